package page

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// statusOf has the text in each place that is shown.
func statusOf(text string) status.Status {
	since := time.Unix(1_000_000, 0)
	health := status.Health{State: sharing.HealthState("x" + text), Reason: "x" + text, Since: &since}
	text = "x" + text
	unit := status.Unit{
		ID: text, Index: text, Profile: text, Resource: text, Replicas: 2, Health: health,
		Holders: []status.Holder{{Namespace: text, Pod: text, Container: text, Resource: text, Devices: []string{text}}},
	}
	partition := unit
	partition.Placement = &mig.Placement{Size: 1}
	ref := nodereport.ProfileRef{Name: text, Source: text, Generation: text}
	return status.Status{
		Node: text, Version: text, Role: status.Role(text), Unready: []string{text + "!"}, Unread: text, Warnings: []string{text},
		Profile:   status.Profile{State: nodereport.ProfileState(text), Since: since, Wanted: ref, Applied: &ref, Problem: text, Error: text},
		Resources: []status.Resource{{Name: text, Strategy: text, Refused: map[plugin.RefusalReason]uint64{plugin.RefusalReason(text): 1}}},
		GPUs:      []status.GPU{{UUID: text, Model: text, Health: health, Use: &status.Use{Throttled: []sharing.ThrottleReason{sharing.ThrottleReason(text)}, Unattributed: []sharing.UnattributedUtilization{{Cause: sharing.UnattributedCause(text)}}}, Units: []status.Unit{unit, partition}}},
		Layouts:   []nodereport.GPULayout{{GPU: text, Wanted: text, State: nodereport.LayoutState(text), Reason: text}},
		Elsewhere: []status.Unit{unit},
	}
}

// xidLink is the link made of an XID in a text.
var xidLink = regexp.MustCompile(`<a href="` + regexp.QuoteMeta(runbook) + `" rel="noreferrer" target="_blank">(XID \d+)</a>`)

// label is a partition's profile where there is room for it.
var label = regexp.MustCompile(`<text x="[\d.]+" y="19">[^<]*</text>`)

// markup lists the page's tags in order, without links of XIDs and labels, and the number of quotation marks.
func markup(page string) []string {
	page = label.ReplaceAllString(xidLink.ReplaceAllString(page, "$1"), "")
	tags := regexp.MustCompile(`</?[a-zA-Z!][^\s>]*`).FindAllString(page, -1)
	return append(tags, strings.Repeat(`"`, strings.Count(page, `"`)))
}

// FuzzPage checks that no text, wherever it is shown, changes the page's markup or adds a character that a
// browser acts on.
func FuzzPage(f *testing.F) {
	for _, text := range []string{"", "plain", "XID 79, XID 7x", `"><script>alert(1)</script>`, "javascript:x", "{{.}}", "</style></title><!--", "&lt;&#60;", "\x1b[31m", "\u202e\u2066", "\xff\xfe", "a\x00b", "'`=<>/", "+ADw-script+AD4-"} {
		f.Add(text)
	}
	now := time.Unix(1_000_100, 0)
	plain := markup(drawn(f, statusOf(""), now))
	f.Fuzz(func(t *testing.T, text string) {
		page := drawn(t, statusOf(text), now)
		if diff := cmp.Diff(plain, markup(page)); diff != "" {
			t.Errorf("%q changes the markup: %s", text, diff)
		}
		if page != status.Plain(page) {
			t.Errorf("%q has a browser do something", text)
		}
	})
}
