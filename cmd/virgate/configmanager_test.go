package main

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/configsource"
)

// TestConfigManagerLinks goes through choices one after the other, on one link.
func TestConfigManagerLinks(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("four", "version: v1")
	put("broken", "nonsense: v1")
	link := filepath.Join(t.TempDir(), "config.yaml")
	var log bytes.Buffer
	m := configManager{dir: dir, link: link, log: slog.New(slog.NewTextHandler(&log, nil))}
	for _, step := range []struct {
		name, choice string
		fallbacks    []configsource.Fallback
		target, says string
	}{
		{"nothing to choose by", "", nil, "none", "no fallback"},
		{"a profile", "four", nil, "four", "profile chosen"},
		{"the same again", "four", nil, "four", ""},
		{"a profile that is not there", "five", nil, "four", `wants \"five\"`},
		{"the same complaint again", "five", nil, "four", ""},
		{"a broken profile, which the plugin refuses", "broken", nil, "broken", "profile chosen"},
		{"the empty document", "", []configsource.Fallback{configsource.FallbackEmpty}, "", "profile chosen"},
		{"the empty document again", "", []configsource.Fallback{configsource.FallbackEmpty}, "", ""},
		{"a profile after that", "four", nil, "four", "profile chosen"},
	} {
		t.Run(step.name, func(t *testing.T) {
			log.Reset()
			m.node = &configsource.NodeSource{Source: &configsource.Directory{Path: dir}, Default: step.choice, Fallbacks: step.fallbacks}
			if err := m.run(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			got := "none"
			if target, err := os.Readlink(link); err == nil {
				got = filepath.Base(target)
			} else if data, err := os.ReadFile(link); err == nil && len(data) == 0 {
				got = ""
			}
			if got != step.target {
				t.Errorf("the link leads to %q, want %q", got, step.target)
			}
			if said := log.String(); !strings.Contains(said, step.says) || (step.says == "" && said != "") {
				t.Errorf("it says %q, want %q", said, step.says)
			}
		})
	}
}

func TestConfigManagerCannotLink(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "four"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	m := configManager{
		node: &configsource.NodeSource{Source: &configsource.Directory{Path: dir}, Default: "four"}, dir: dir,
		link: filepath.Join(dir, "none", "config.yaml"), log: slog.New(slog.NewTextHandler(&log, nil)),
	}
	if err := m.run(t.Context(), true); err != nil || !strings.Contains(log.String(), "no such file") {
		t.Errorf("%v, says %q", err, log.String())
	}
}

func TestProgramNames(t *testing.T) {
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, ""},
		{[]string{"/usr/bin/virgate", "plan"}, "/usr/bin/virgate plan"},
		{[]string{"nvidia-device-plugin"}, "nvidia-device-plugin run"},
		{[]string{"/usr/bin/nvidia-device-plugin", "--mig-strategy=mixed"}, "/usr/bin/nvidia-device-plugin run --mig-strategy=mixed"},
		{[]string{"/usr/bin/config-manager", "--oneshot"}, "/usr/bin/config-manager config-manager --oneshot"},
	} {
		if got := strings.Join(impliedCommand(test.args), " "); got != test.want {
			t.Errorf("%q: %q, want %q", test.args, got, test.want)
		}
	}
}

func TestConfigManagerNeedsItsFlags(t *testing.T) {
	var stderr bytes.Buffer
	none := func(string) (string, bool) { return "", false }
	code := run(context.Background(), []string{"config-manager"}, none, io.Discard, &stderr)
	if code != 2 || !strings.Contains(stderr.String(), "--config-dir") {
		t.Errorf("code %d, says %q", code, stderr.String())
	}
}
