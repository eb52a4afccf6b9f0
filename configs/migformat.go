package configs

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// FormatMIGConfigs writes the layouts as a mig-parted document, which
// ParseMIGConfigs reads back to the same. An error says that there are none.
func FormatMIGConfigs(layouts MIGConfigs) (string, error) {
	if len(layouts) == 0 {
		return "", errors.New("there is no MIG layout to write")
	}
	var b strings.Builder
	b.WriteString("version: v1\n" + migConfigsKey + ":\n")
	for _, layout := range layouts {
		fmt.Fprintf(&b, "  %s:\n", strconv.Quote(layout.Name))
		for _, block := range layout.Blocks {
			formatBlock(&b, block)
		}
	}
	return b.String(), nil
}

func formatBlock(b *strings.Builder, block sharing.LayoutBlock) {
	indent := "  - "
	line := func(format string, args ...any) {
		fmt.Fprintf(b, indent+format+"\n", args...)
		indent = "    "
	}
	if len(block.Filters) > 0 {
		line("device-filter: [%s]", joined(block.Filters, func(f sharing.BoardFilter) string { return strconv.Quote(f.String()) }))
	}
	if block.All {
		line("devices: all")
	} else {
		line("devices: [%s]", joined(block.Indexes, strconv.Itoa))
	}
	line("mig-enabled: %t", block.Layout.MIG)
	if block.Layout.MIG {
		line("mig-devices: {%s}", joined(block.Layout.Partitions, func(c mig.Count) string {
			return fmt.Sprintf("%q: %d", c.Profile, c.Count)
		}))
	}
}

func joined[T any](items []T, text func(T) string) string {
	texts := make([]string, len(items))
	for i, item := range items {
		texts[i] = text(item)
	}
	return strings.Join(texts, ", ")
}
