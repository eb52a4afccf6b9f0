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

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/test/shortdir"
)

// TestConfigManagerLinks makes one choice after another, with one link.
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
	const rules = "rules: [{nodeSelector: {nvidia.com/gpu.family: ampere}, profile: four}]"
	for _, step := range []struct {
		name, choice string
		fallbacks    []configsource.Fallback
		target, says string
	}{
		{"nothing to choose by", "", nil, "none", "no fallback"},
		{"a profile", "four", nil, "four", "profile chosen"},
		{"the same again", "four", nil, "four", ""},
		{"a profile that is not there", "five", nil, "four", `names \"five\"`},
		{"the same complaint again", "five", nil, "four", ""},
		{"a broken profile, which the plugin refuses", "broken", nil, "broken", "profile chosen"},
		{"the empty document", "", []configsource.Fallback{configsource.FallbackEmpty}, "", "profile chosen"},
		{"the empty document again", "", []configsource.Fallback{configsource.FallbackEmpty}, "", ""},
		{"a profile after that", "four", nil, "four", "profile chosen"},
		{"rules by what it does not know", "broken", nil, "four", "rule 1 asks for nvidia.com/gpu.family, which only virgate run"},
		{"rules by labels", "broken", nil, "broken", "profile chosen"},
		{"the only profile beside rules", "", []configsource.Fallback{configsource.FallbackSingle}, "four", "profile chosen"},
		{"rules that are broken", "broken", nil, "four", "[virgate-rules]:1: rules: expected a list"},
	} {
		t.Run(step.name, func(t *testing.T) {
			switch step.name {
			case "rules by what it does not know":
				put(configs.RulesName, rules)
			case "rules by labels":
				put(configs.RulesName, strings.Replace(rules, "nvidia.com/gpu.family", "pool", 1))
			case "the only profile beside rules":
				if err := os.Remove(filepath.Join(dir, "broken")); err != nil {
					t.Fatal(err)
				}
			case "rules that are broken":
				put(configs.RulesName, "rules: 7")
			}
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

// TestConfigManagerBooleans has the init container end for any spelling, as the pod, and so the node's GPUs, wait
// for it. A flag without effect does not swallow a value.
func TestConfigManagerBooleans(t *testing.T) {
	profiles := t.TempDir()
	if err := os.WriteFile(filepath.Join(profiles, "four"), []byte("version: v1"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		once  string
		flags []string
		code  int
		says  string
	}{
		{"true", nil, 0, ""},
		{"1", nil, 0, ""},
		{"T", nil, 0, ""},
		{"TRUE", []string{"--signal", "HUP"}, 0, ""},
		{"", []string{"--send-signal", "--oneshot"}, 0, ""},
		{"maybe", []string{"--send-signal=false", "--oneshot"}, 0, ""},
		{"maybe", nil, 2, `$ONESHOT: expected true or false (got "maybe")`},
	} {
		link := filepath.Join(t.TempDir(), "config.yaml")
		var stderr bytes.Buffer
		variable := func(name string) (string, bool) {
			value, ok := map[string]string{"ONESHOT": test.once, "SEND_SIGNAL": "perhaps", "SIGNAL": "", "DEFAULT_CONFIG": "four"}[name]
			return value, ok
		}
		args := append([]string{"config-manager", "--config-file-srcdir", profiles, "--config-file-dst", link}, test.flags...)
		code := run(t.Context(), args, variable, io.Discard, &stderr)
		target, err := os.Readlink(link)
		if code != test.code || !strings.Contains(stderr.String(), test.says) || (err == nil) != (test.code == 0) {
			t.Errorf("ONESHOT=%s %v: code %d, link to %q:\n%s", test.once, test.flags, code, target, stderr.String())
		}
	}
}

// TestMPSReadsOnlyItsSettings checks that a bad value of a setting that the daemons do not depend on does
// not end them.
func TestMPSReadsOnlyItsSettings(t *testing.T) {
	for flag, want := range map[string]int{"--mig-strategy=both": 0, "--cdi-annotation-prefix=?": 0, "--driver-root=relative": 2} {
		ctx, end := context.WithCancel(t.Context())
		end()
		root := shortdir.New(t)
		var stderr bytes.Buffer
		variable := func(name string) (string, bool) {
			value, ok := map[string]string{"DEVICE_ID_STRATEGY": "serial", "IMEX_CHANNEL_IDS": "7"}[name]
			return value, ok
		}
		args := []string{"mps-control-daemon", "--node", "sim:t4", "--mps-root", root, flag}
		if code := run(ctx, args, variable, io.Discard, &stderr); code != want {
			t.Errorf("%s: code %d, want %d:\n%s", flag, code, want, stderr.String())
		}
	}
}
