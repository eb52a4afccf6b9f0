package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/sharing"
)

// TestListFlags checks that a list is accepted as by NVIDIA's plugin: by a repeated flag, with commas, or both;
// by a variable with commas. The flag replaces the variable's whole list.
func TestListFlags(t *testing.T) {
	const envvar, mounts, cri = sharing.Envvar, sharing.VolumeMounts, sharing.CDICRI
	for _, test := range []struct {
		name, variable string
		args           []string
		want           []sharing.DeviceListStrategy
		errs           bool
	}{
		{"default", "", nil, []sharing.DeviceListStrategy{envvar}, false},
		{"once", "", []string{"cdi-cri"}, []sharing.DeviceListStrategy{cri}, false},
		{"repeated", "", []string{"envvar", "cdi-cri"}, []sharing.DeviceListStrategy{envvar, cri}, false},
		{"repeated the other way round", "", []string{"cdi-cri", "envvar"}, []sharing.DeviceListStrategy{cri, envvar}, false},
		{"commas and repeated", "", []string{"envvar, volume-mounts", "cdi-cri"}, []sharing.DeviceListStrategy{envvar, mounts, cri}, false},
		{"the same twice", "", []string{"cdi-cri", "cdi-cri"}, []sharing.DeviceListStrategy{cri}, false},
		{"variable", "volume-mounts,cdi-cri", nil, []sharing.DeviceListStrategy{mounts, cri}, false},
		{"the flag wins", "volume-mounts,cdi-cri", []string{"envvar"}, []sharing.DeviceListStrategy{envvar}, false},
		{"one of them is wrong", "", []string{"envvar", "smoke"}, nil, true},
		{"one of them is empty", "", []string{"envvar", ""}, nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			variables := func(name string) (string, bool) {
				return test.variable, test.variable != "" && name == "DEVICE_LIST_STRATEGY"
			}
			var config configs.Config
			var err error
			command := &cli.Command{Flags: settingFlags(), Action: func(_ context.Context, cmd *cli.Command) error {
				config, err = configs.Parse("", nil, overrides(cmd, variables))
				return nil
			}}
			args := []string{"virgate"}
			for _, arg := range test.args {
				args = append(args, "--device-list-strategy", arg)
			}
			if err := command.Run(t.Context(), args); err != nil {
				t.Fatal(err)
			}
			if (err != nil) != test.errs {
				t.Fatalf("error %v", err)
			}
			if diff := cmp.Diff(test.want, config.Profile.Grants.Strategies); diff != "" {
				t.Errorf("strategies (-want +got):\n%s", diff)
			}
		})
	}
}

// TestRepeatedNumbers checks that the other lists of NVIDIA's plugin are read the same way.
func TestRepeatedNumbers(t *testing.T) {
	var got configs.Overrides
	command := &cli.Command{Flags: settingFlags(), Action: func(_ context.Context, cmd *cli.Command) error {
		got = overrides(cmd, func(string) (string, bool) { return "", false })
		return nil
	}}
	args := slices.Concat([]string{"virgate"}, []string{"--imex-channel-ids", "0", "--imex-channel-ids=1,2"}, []string{"--cdi-feature-flags=a", "--cdi-feature-flags=b"})
	if err := command.Run(t.Context(), args); err != nil {
		t.Fatal(err)
	}
	want := configs.Overrides{
		"imex.channelIDs":              {Value: "0,1,2", Source: "--imex-channel-ids"},
		"flags.plugin.cdiFeatureFlags": {Value: "a,b", Source: "--cdi-feature-flags"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("overrides (-want +got):\n%s", diff)
	}
}

// TestPodResources checks where the socket is expected: at the flag's path, where the chart mounts it, or below
// the host's root, which the GPU Operator mounts.
func TestPodResources(t *testing.T) {
	mounted, host := t.TempDir(), t.TempDir()
	for _, folder := range []string{"kubelet", mounted} {
		if err := os.MkdirAll(filepath.Join(host, folder), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name, preset string
		args         []string
		want         string
	}{
		{"the folder is mounted", filepath.Join(mounted, "s.sock"), nil, filepath.Join(mounted, "s.sock")},
		{"the host's root is mounted", "/kubelet/s.sock", nil, host + "/kubelet/s.sock"},
		{"neither is", "/other/s.sock", nil, "/other/s.sock"},
		{"a flag says another", "", []string{"--pod-resources-socket", "/kubelet/s.sock"}, "/kubelet/s.sock"},
		{"a flag says none", "/kubelet/s.sock", []string{"--pod-resources-socket", ""}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := "not called"
			command := &cli.Command{
				Flags:  []cli.Flag{&cli.StringFlag{Name: "pod-resources-socket", Value: test.preset}},
				Action: func(_ context.Context, cmd *cli.Command) error { got = podResources(cmd, host); return nil },
			}
			if err := command.Run(t.Context(), append([]string{"run"}, test.args...)); err != nil || got != test.want {
				t.Errorf("%q, %v, want %q", got, err, test.want)
			}
		})
	}
}
