package configs

import (
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

func TestGrants(t *testing.T) {
	with := func(change func(*sharing.Grants)) sharing.Grants {
		grants := withDefaults(nil).Grants
		change(&grants)
		return grants
	}
	tests := []struct {
		name, document string
		want           sharing.Grants
	}{
		{"a list", "flags: {plugin: {deviceListStrategy: [cdi-cri, volume-mounts]}}", with(func(g *sharing.Grants) {
			g.Strategies = []sharing.ListStrategy{sharing.CDICRI, sharing.VolumeMounts}
		})},
		{"a text with commas", `flags: {plugin: {deviceListStrategy: "cdi-annotations, envvar"}}`, with(func(g *sharing.Grants) {
			g.Strategies = []sharing.ListStrategy{sharing.CDIAnnotations, sharing.Envvar}
		})},
		{"a strategy twice", "flags: {plugin: {deviceListStrategy: [envvar, cdi-cri, envvar]}}", with(func(g *sharing.Grants) {
			g.Strategies = []sharing.ListStrategy{sharing.Envvar, sharing.CDICRI}
		})},
		{"switches", "flags: {gdrcopyEnabled: true, gdsEnabled: true, mofedEnabled: true, plugin: {passDeviceSpecs: true}}", with(func(g *sharing.Grants) {
			g.DeviceNodes, g.GDRCopy, g.GDS, g.MOFED = true, true, true, true
		})},
		{"one switch is one switch", "flags: {gdsEnabled: true}", with(func(g *sharing.Grants) { g.GDS = true })},
		{"another one", "flags: {mofedEnabled: true}", with(func(g *sharing.Grants) { g.MOFED = true })},
		{"prefix", "flags: {plugin: {cdiAnnotationPrefix: example.com/}}", with(func(g *sharing.Grants) { g.AnnotationPrefix = "example.com/" })},
		{"driver mounts", "flags: {plugin: {deviceListStrategy: driver-mounts, driverMounts: {hostPath: /home/kubernetes/bin/nvidia, containerPath: /opt/nvidia}}}",
			with(func(g *sharing.Grants) {
				g.Strategies = []sharing.ListStrategy{sharing.DriverMounts}
				g.DriverHostPath, g.DriverContainerPath = "/home/kubernetes/bin/nvidia", "/opt/nvidia"
			})},
		{"empty texts are the defaults", `flags: {plugin: {cdiAnnotationPrefix: "", driverMounts: {hostPath: "", containerPath: ""}}}`, with(func(*sharing.Grants) {})},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, parse(t, test.document).Profile.Grants); diff != "" {
				t.Errorf("grants (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAnnotationPrefix(t *testing.T) {
	label := strings.Repeat("a", 49)
	domain := strings.Repeat(label+".", 5)
	tests := []struct {
		name, prefix string
		ok           bool
	}{
		{"the runtimes' own", "cdi.k8s.io/", true},
		{"one label", "team/", true},
		{"the longest", domain + "abc/", true},
		{"one more", domain + "abcd/", false},
		{"no slash", "cdi.k8s.io", false},
		{"only a slash", "/", false},
		{"two slashes", "cdi.k8s.io//", false},
		{"behind the slash", "cdi.k8s.io/virgate-", false},
		{"upper case", "CDI.k8s.io/", false},
		{"an empty label", "cdi..io/", false},
		{"a blank", "cdi.k8s.io /", false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("", nil, Overrides{"flags.plugin.cdiAnnotationPrefix": {Value: test.prefix, Source: "$X"}})
			want := "flags.plugin.cdiAnnotationPrefix: expected a lower-case domain and a slash, such as cdi.k8s.io/ (got " + strconv.Quote(test.prefix) + ")"
			if ok := err == nil; ok != test.ok || !ok && len(test.prefix) < valueShown && !strings.Contains(err.Error(), want) {
				t.Errorf("error is %v, want %t for none", err, test.ok)
			}
		})
	}
}
