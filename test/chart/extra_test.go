package chart

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v3/pkg/chartutil"
	corev1 "k8s.io/api/core/v1"
)

// podOf returns the DaemonSet's pod for the values.
func podOf(t *testing.T, values string) corev1.PodSpec {
	t.Helper()
	return daemonSet(t, decode(t, manifestOf(t, values))).Spec.Template.Spec
}

// refused checks that the values, in YAML, are refused with a message.
func refused(t *testing.T, values, want string) {
	t.Helper()
	read, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := render(t, read); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: got %v, want %q", values, err, want)
	}
}

// TestKubeletRootDir checks what is below the kubelet's root directory. The path of device-plugins is fixed
// in the kubelet (kubernetes, pkg/kubelet/cm/devicemanager/manager.go).
func TestKubeletRootDir(t *testing.T) {
	const root = "/srv/kubelet"
	for name, driver := range map[string]string{"false": "gpu.virgate.github.io", "true": "gpu.nvidia.com"} {
		pod := podOf(t, "{kubeletRootDir: "+root+", standby: {enabled: true}, dra: {enabled: true, nvidiaNames: "+name+"}}")
		hosts := map[string]string{}
		for _, volume := range pod.Volumes {
			if volume.HostPath != nil {
				hosts[volume.Name] = volume.HostPath.Path
			}
		}
		want := map[string]string{
			"device-plugins": "/var/lib/kubelet/device-plugins", "pod-resources": root + "/pod-resources",
			"dra": root + "/plugins/" + driver, "plugins-registry": root + "/plugins_registry", "cdi": "/var/run/cdi", "all-gpus": "/dev/null",
			"driver-root": "/", // CDI specs are made of it.
		}
		if diff := cmp.Diff(want, hosts); diff != "" {
			t.Errorf("host folders (-want +got):\n%s", diff)
		}
		for _, container := range pod.Containers {
			mounts := map[string]string{}
			for _, mount := range container.VolumeMounts {
				mounts[mount.Name] = mount.MountPath
			}
			// The kubelet connects to the paths that the driver reports. Only the program uses the others.
			if mounts["dra"] != hosts["dra"] || mounts["plugins-registry"] != hosts["plugins-registry"] || mounts["pod-resources"] != "/var/lib/kubelet/pod-resources" {
				t.Errorf("%s: mounts %q", container.Name, mounts)
			}
			arguments := strings.Join(container.Args, " ")
			if !strings.Contains(arguments, "--dra-plugins-dir="+root+"/plugins --dra-registry-dir="+root+"/plugins_registry") {
				t.Errorf("%s: arguments %s", container.Name, arguments)
			}
		}
	}
	if manifest := manifestOf(t, "dra: {enabled: true}"); strings.Contains(manifest, "--dra-plugins-dir") {
		t.Error("the flag is there with the default directory")
	}
	for _, wrong := range []string{"''", "var/lib/kubelet", "/var/lib/kubelet/", "/"} {
		refused(t, "kubeletRootDir: "+wrong, "kubeletRootDir")
	}
}

// TestImage checks how the image is named, in every container.
func TestImage(t *testing.T) {
	const digest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	for values, want := range map[string]string{
		"image: {repository: r.example.com/v}":                           "r.example.com/v:" + load(t).Metadata.AppVersion,
		"image: {repository: r.example.com/v, tag: t1}":                  "r.example.com/v:t1",
		"image: {repository: r.example.com/v, digest: '" + digest + "'}": "r.example.com/v@" + digest,
		"image: {repository: v, tag: t1, digest: '" + digest + "'}":      "v@" + digest,
	} {
		for _, others := range []string{"mps: {enabled: true}", "uninstall: true"} {
			pod := podOf(t, "{"+values+", "+others+"}")
			for _, container := range append(pod.InitContainers, pod.Containers...) {
				if container.Image != want {
					t.Errorf("%s, %s: image %s, want %s", values, container.Name, container.Image, want)
				}
			}
		}
	}
	refused(t, "image: {digest: 0123}", "digest")
	refused(t, "image: {digest: 'sha256:0123'}", "digest")
	for _, theirs := range []string{"nvcr.io/nvidia/k8s-device-plugin", "nvidia/k8s-device-plugin", "mirror.example.com/nvidia/k8s-device-plugin"} {
		refused(t, "image: {repository: "+theirs+"}", "image.repository: "+theirs+" is an image of NVIDIA's")
	}
	manifestOf(t, "image: {repository: example.com/k8s-device-plugin}") // An image of Virgate under the name that the GPU Operator requires.
}

// TestExtraVolumes checks that the serving container has the extra volumes, and that none replaces one of
// the chart's.
func TestExtraVolumes(t *testing.T) {
	pod := podOf(t, "{standby: {enabled: true}, extraVolumes: [{name: web, secret: {secretName: s}}], extraVolumeMounts: [{name: web, mountPath: /etc/web, readOnly: true}, {name: run, mountPath: /var/tmp}]}")
	for _, container := range pod.Containers {
		mounts := fmt.Sprint(container.VolumeMounts)
		if !strings.Contains(mounts, "/etc/web") || !strings.Contains(mounts, "/var/tmp") {
			t.Errorf("%s: mounts %s", container.Name, mounts)
		}
	}
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	volumes, mounts := map[string]string{}, map[string]string{} // Each with a file that has it.
	for _, file := range files {
		if file == "testdata/disabled.values.yaml" {
			continue // It has no DaemonSet by design.
		}
		pod := daemonSet(t, decode(t, rendered(t, read(t, file)))).Spec.Template.Spec
		for _, volume := range pod.Volumes {
			if volume.Name != "web" {
				volumes[volume.Name] = file
			}
		}
		for _, mount := range pod.Containers[0].VolumeMounts {
			if mount.Name != "web" {
				mounts[mount.MountPath] = file
			}
		}
	}
	if len(volumes) < 10 || len(mounts) < 10 {
		t.Errorf("testdata has volumes %q and mounts %q", volumes, mounts)
	}
	own := map[string]any{"name": "web", "emptyDir": map[string]any{}}
	for name, file := range volumes {
		values := read(t, file)
		values["extraVolumes"] = []any{own, map[string]any{"name": name, "emptyDir": map[string]any{}}}
		if _, _, err := render(t, values); err == nil || !strings.Contains(err.Error(), "extraVolumes: "+name+" is there twice") {
			t.Errorf("%s: a second volume %s: error %v", file, name, err)
		}
	}
	for path, file := range mounts {
		values := read(t, file)
		values["extraVolumes"] = []any{own}
		values["extraVolumeMounts"] = []any{map[string]any{"name": "web", "mountPath": path + "/"}}
		if _, _, err := render(t, values); err == nil || !strings.Contains(err.Error(), "extraVolumeMounts: something is mounted at "+path) {
			t.Errorf("%s: a second mount at %s: error %v", file, path, err)
		}
	}
	refused(t, "extraVolumeMounts: [{name: none, mountPath: /x}]", "extraVolumeMounts: there is no volume none")
	refused(t, "{extraVolumes: [{name: a, emptyDir: {}}, {name: a, emptyDir: {}}]}", "extraVolumes: a is there twice")
	refused(t, "extraVolumes: [{emptyDir: {}}]", "name")
	refused(t, "extraVolumeMounts: [{name: run, mountPath: x}]", "mountPath")
}

// rendered returns the manifest for the values.
func rendered(t *testing.T, values map[string]any) string {
	t.Helper()
	manifest, _, err := render(t, values)
	if err != nil {
		t.Fatal(err)
	}
	return manifest
}

// TestProbesOfAProtectedPort checks that the kubelet, which has no password, probes another port if the
// metrics' port has TLS or a password, and that Prometheus gets the right settings.
func TestProbesOfAProtectedPort(t *testing.T) {
	for values, want := range map[string][]string{
		"{}": {"http"},
		"{metrics: {port: 9500}, extraArgs: [--web-config-file=/etc/web.yaml]}":               {"9501"},
		"{extraArgs: [--web-config-file, /etc/web.yaml], standby: {enabled: true}}":           {"9401", "9402"},
		"{extraArgs: [--web-config-file-of-another], metrics: {podMonitor: {enabled: true}}}": {"http"},
	} {
		var got []string
		for _, container := range podOf(t, values).Containers {
			port := container.ReadinessProbe.HTTPGet.Port.String()
			if health := strings.Contains(strings.Join(container.Args, " "), "--health-listen=:"+port); health != (port != "http") {
				t.Errorf("%s: the probes ask at %s, the arguments are %q", values, port, container.Args)
			}
			if container.LivenessProbe.HTTPGet.Port.String() != port || container.StartupProbe.HTTPGet.Port.String() != port {
				t.Errorf("%s: the probes ask at several ports", values)
			}
			got = append(got, port)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", values, diff)
		}
	}
	for values, want := range map[string]string{
		"": " ",
		", scheme: https, tlsConfig: {insecureSkipVerify: true, serverName: v}": "https v",
	} {
		for _, object := range decode(t, manifestOf(t, "metrics: {podMonitor: {enabled: true"+values+"}}")) {
			monitor, ok := object.(*monitoring.PodMonitor)
			if !ok {
				continue
			}
			endpoint, server, scheme := monitor.Spec.PodMetricsEndpoints[0], "", ""
			if endpoint.Scheme != nil {
				scheme = string(*endpoint.Scheme)
			}
			if endpoint.TLSConfig != nil && endpoint.TLSConfig.ServerName != nil {
				server = *endpoint.TLSConfig.ServerName
			}
			if got := scheme + " " + server; got != want {
				t.Errorf("%s: scheme and name of the server are %q, want %q", values, got, want)
			}
		}
	}
	refused(t, "metrics: {podMonitor: {scheme: ftp}}", "scheme")
}

// TestRollout checks that the rollout accepts numbers and percentages of nodes.
func TestRollout(t *testing.T) {
	for values, want := range map[string]string{
		"{}": "10% 0",
		"updateStrategy: {rollingUpdate: {maxSurge: 25%}}":                                                                "25% 0",
		"updateStrategy: {rollingUpdate: {maxSurge: 3}}":                                                                  "3 0",
		"updateStrategy: {type: OnDelete, rollingUpdate: {maxSurge: 3, maxUnavailable: 1}}":                               "3 1",
		"updateStrategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 5%}}":                                              "0 5%",
		"{devicePlugin: {enableHostNetwork: true}, updateStrategy: {rollingUpdate: {maxSurge: 0%, maxUnavailable: 20%}}}": "0% 20%",
	} {
		rolling := daemonSet(t, decode(t, manifestOf(t, values))).Spec.UpdateStrategy.RollingUpdate
		if got := rolling.MaxSurge.String() + " " + rolling.MaxUnavailable.String(); got != want {
			t.Errorf("%s: got %s, want %s", values, got, want)
		}
	}
	for _, wrong := range []string{"maxSurge: ten", "maxSurge: '10'", "maxUnavailable: -1", "maxUnavailable: 110%", "maxSurges: 1"} {
		refused(t, "updateStrategy: {rollingUpdate: {"+wrong+"}}", "updateStrategy")
	}
	refused(t, "updateStrategy: {rollingUpdate: {maxSurge: 0}}", "updateStrategy.rollingUpdate: with maxSurge and maxUnavailable 0 no pod is ever replaced")
	if storage := podOf(t, "{}").Containers[0].Resources.Requests.StorageEphemeral(); storage.IsZero() {
		t.Error("the container requests no ephemeral-storage")
	}
}

// rulesOf returns the alerts of the PrometheusRule with metrics.rules.
func rulesOf(t *testing.T, values string) map[string]monitoring.Rule {
	t.Helper()
	alerts := map[string]monitoring.Rule{}
	for _, object := range decode(t, manifestOf(t, "metrics: {rules: {enabled: true, "+values+"}}")) {
		rule, ok := object.(*monitoring.PrometheusRule)
		if !ok {
			continue
		}
		for _, group := range rule.Spec.Groups {
			if len(group.Rules) == 0 {
				t.Errorf("group %s is empty", group.Name)
			}
			for _, r := range group.Rules {
				if r.Alert != "" {
					alerts[r.Alert] = r
				}
			}
		}
	}
	if len(alerts) == 0 {
		t.Fatal("no alerts")
	}
	return alerts
}

// TestRulesOfValues checks that values can remove alerts, change thresholds and set another runbook, and
// that nothing else changes.
func TestRulesOfValues(t *testing.T) {
	before := rulesOf(t, "")
	after := rulesOf(t, "disabled: [VirgateMPSDaemonDown, VirgateMPSDaemonRestarts, VirgateMPSUnanswered, VirgateGPUHot], runbookURL: 'https://w.example.com/x/'")
	if len(after) != len(before)-4 {
		t.Errorf("%d alerts of %d are left", len(after), len(before))
	}
	for name, rule := range after {
		want := before[name]
		if got := rule.Annotations["runbook_url"]; got != "https://w.example.com/x/"+strings.ToLower(name) {
			t.Errorf("%s: runbook %s", name, got)
		}
		if rule.Expr != want.Expr || rule.Annotations["description"] != want.Annotations["description"] {
			t.Errorf("%s is another one", name)
		}
	}
	threshold := regexp.MustCompile(`([0-9.e+]+) # threshold`)
	with := 0
	for name, rule := range before {
		found := threshold.FindStringSubmatch(rule.Expr.String())
		if found == nil {
			refused(t, "metrics: {rules: {enabled: true, thresholds: {"+name+": 1}}}", "metrics.rules.thresholds: "+name)
			continue
		}
		with++
		for _, number := range []string{"7.25", "12", "20000000000"} {
			changed := rulesOf(t, "thresholds: {"+name+": "+number+"}")[name]
			got := changed.Expr.String()
			want := strings.Replace(rule.Expr.String(), found[0], number+" # threshold", 1)
			if got = strings.Replace(got, "2e+10", "20000000000", 1); got != want {
				t.Errorf("%s: expression\n%s\nwant\n%s", name, got, want)
			}
		}
	}
	if with < 5 {
		t.Errorf("%d alerts have a threshold", with)
	}
	refused(t, "metrics: {rules: {enabled: true, disabled: [VirgateGPUWarm]}}", "metrics.rules.disabled: no alert is called VirgateGPUWarm: there are VirgateGPUUnhealthy")
	refused(t, "metrics: {rules: {enabled: true, thresholds: {VirgateGPUWarm: 1}}}", "metrics.rules.thresholds: VirgateGPUWarm")
	refused(t, "metrics: {rules: {thresholds: {VirgateGPUHot: hot}}}", "thresholds")
}

// TestDriverRootIsWatched checks the mount of the folder that holds the driver root. A container that has
// bound the driver root keeps it when another driver is mounted there, and sees the other one only in that
// folder. The folder is mounted only where drivers come in containers: elsewhere it may hold far more than
// the driver.
func TestDriverRootIsWatched(t *testing.T) {
	for values, want := range map[string]struct{ root, folder, watched string }{
		"{}":                                     {root: "/"}, // DRA's CDI specs are made of it.
		"{nvidiaDriverRoot: /run/nvidia/driver}": {"/run/nvidia/driver", "/run/nvidia", "driver"},
		"{nvidiaDriverRoot: /run/nvidia/driver/, standby: {enabled: true}}":    {"/run/nvidia/driver/", "/run/nvidia", "driver"},
		"{nvidiaDriverRoot: /home/kubernetes/bin/nvidia, mig: {manage: true}}": {root: "/home/kubernetes/bin/nvidia"},
		"{nvidiaDriverRoot: /var/run/nvidia/driver}":                           {"/var/run/nvidia/driver", "/var/run/nvidia", "driver"},
		"{nvidiaDriverRoot: /run/driver}":                                      {root: "/run/driver"},
		"{nvidiaDriverRoot: /var/lib/nvidia}":                                  {root: "/var/lib/nvidia"},
		"{nvidiaDriverRoot: /srv/run/nvidia/driver}":                           {root: "/srv/run/nvidia/driver"},
		"{nvidiaDriverRoot: /}":                                                {root: "/"},
		"{nvidiaDriverRoot: /driver}":                                          {root: "/driver"},
		"{mig: {manage: true}}":                                                {root: "/"},
		"{driverAccess: privileged}":                                           {root: "/"},
	} {
		t.Run(values, func(t *testing.T) {
			pod := podOf(t, strings.Replace(values, "{", "{mps: {enabled: true}, dra: {enabled: true}, featureLabels: {enabled: true}, ", 1))
			for name, path := range map[string]string{"driver-root": want.root, "driver-root-parent": want.folder} {
				at := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
				if path == "" && at >= 0 || path != "" && (at < 0 || pod.Volumes[at].HostPath.Path != path) {
					t.Errorf("volume %s: want %q, got %v", name, path, pod.Volumes)
				}
			}
			for _, container := range pod.Containers {
				for name, wanted := range map[string]bool{"driver-root": want.root != "", "driver-root-parent": want.folder != ""} {
					at := slices.IndexFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
					if wanted != (at >= 0) {
						t.Errorf("%s: mounted %s: %t", container.Name, name, at >= 0)
					} else if at >= 0 && (!container.VolumeMounts[at].ReadOnly || *container.VolumeMounts[at].MountPropagation != corev1.MountPropagationHostToContainer || container.VolumeMounts[at].MountPath != "/"+name) {
						t.Errorf("%s: mounts %v", container.Name, container.VolumeMounts[at])
					}
				}
				flag := "--driver-root-watch=/driver-root-parent/" + want.watched
				if watched := slices.Contains(container.Args, flag); watched != (want.watched != "") {
					t.Errorf("%s: arguments %q, %s: %t", container.Name, container.Args, flag, watched)
				}
			}
		})
	}
}
