{{- define "virgate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "virgate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "virgate.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "virgate.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "virgate.namespace" -}}
{{- $namespace := default .Release.Namespace .Values.namespaceOverride -}}
{{- if and (eq $namespace "default") (not .Values.allowDefaultNamespace) -}}
{{- fail "namespace: will not install into the namespace default; choose another with --namespace, or set allowDefaultNamespace" -}}
{{- end -}}
{{- $namespace -}}
{{- end -}}

{{- define "virgate.selectorLabels" -}}
{{- with .Values.selectorLabelsOverride -}}
{{- toYaml . -}}
{{- else -}}
app.kubernetes.io/name: {{ include "virgate.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}

{{- define "virgate.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "virgate.selectorLabels" . }}
{{- end -}}

{{- /* The chart's labels and those of a value, which replace them. */ -}}
{{- define "virgate.labelsWith" -}}
{{- $labels := include "virgate.labels" (first .) | fromYaml -}}
{{- range $name, $value := last . -}}{{- $_ := set $labels $name (toString $value) -}}{{- end -}}
{{- toYaml $labels -}}
{{- end -}}

{{- define "virgate.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The profile of nodes without a label. None is known of a ConfigMap of the
user's own, whose one profile or whose profile "default" the program finds. */ -}}
{{- define "virgate.defaultProfile" -}}
{{- $config := .Values.config -}}
{{- if and (kindIs "invalid" $config.default) (not $config.name) (not $config.map) -}}
exclusive
{{- else -}}
{{- default "" $config.default -}}
{{- end -}}
{{- end -}}

{{- /* The ConfigMap with the profiles; empty when there is none. */ -}}
{{- define "virgate.configMap" -}}
{{- if and .Values.config.name .Values.config.map -}}
{{- fail "config: name and map exclude each other" -}}
{{- else if and .Values.config.examples (or .Values.config.name .Values.config.map) -}}
{{- fail "config.examples: name and map replace the chart's profiles, so that there are no examples: leave it out" -}}
{{- else if .Values.config.name -}}
{{- .Values.config.name -}}
{{- else if or .Values.config.map (include "virgate.defaultProfile" .) -}}
{{- include "virgate.fullname" . }}-profiles
{{- end -}}
{{- end -}}

{{- /* The profiles that a node can choose, as JSON, by name; none of a ConfigMap of the
user's own, which the chart cannot read. */ -}}
{{- define "virgate.profiles" -}}
{{- $profiles := dict -}}
{{- if .Values.config.map -}}
{{- $profiles = .Values.config.map -}}
{{- else if and (include "virgate.configMap" .) (not .Values.config.name) -}}
{{- range $path, $text := .Files.Glob (ternary "{profiles,examples}/*.yaml" "profiles/*.yaml" .Values.config.examples) -}}
{{- $_ := set $profiles (base $path | trimSuffix ".yaml") (toString $text) -}}
{{- end -}}
{{- end -}}
{{- toJson $profiles -}}
{{- end -}}

{{- /* The resources that those profiles share, as JSON, each with one that does. */ -}}
{{- define "virgate.sharedNames" -}}
{{- $shared := dict -}}
{{- range $profile, $text := include "virgate.profiles" . | fromJson -}}
{{- range $name, $_ := include "virgate.sharedBy" $text | fromJson -}}{{- $_ := set $shared $name $profile -}}{{- end -}}
{{- end -}}
{{- toJson $shared -}}
{{- end -}}

{{- /* The resources that a profile shares, as the keys of a JSON object. */ -}}
{{- define "virgate.sharedBy" -}}
{{- $shared := dict -}}
{{- $sharing := get (default "" . | fromYaml) "sharing" -}}
{{- range $way := list "timeSlicing" "mps" -}}
{{- $slices := kindIs "map" $sharing | ternary $sharing dict | dig $way dict -}}
{{- $entries := kindIs "map" $slices | ternary $slices dict | dig "resources" list -}}
{{- range $entry := kindIs "slice" $entries | ternary $entries list -}}
{{- if and (kindIs "map" $entry) (ne "1" (get $entry "replicas" | toString)) -}}
{{- $suffix := eq "true" (get $slices "renameByDefault" | toString) | ternary ".shared" "" -}}
{{- $name := get $entry "rename" | default (printf "%v%s" (get $entry "name") $suffix) | toString -}}
{{- $_ := set $shared (contains "/" $name | ternary $name (printf "nvidia.com/%s" $name)) true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $shared -}}
{{- end -}}

{{- define "virgate.writesSpecs" -}}
{{- if .Values.dra.enabled -}}
{{- if eq (toString .Values.cdi.specs) "false" }}
{{- fail "dra.enabled: containers get claims' devices by CDI specs, and cdi.specs is false" }}
{{- end -}}
true
{{- else if kindIs "bool" .Values.cdi.specs -}}
{{- if .Values.cdi.specs }}true{{ end -}}
{{- else if contains "cdi-" (default "" .Values.deviceListStrategy | toString) -}}
true
{{- end -}}
{{- end -}}

{{- /* Whether the plugin is to read partitions, which the driver lets nobody do without
SYS_ADMIN. A right comes only with the value that names it; profiles bring none, but those
of a ConfigMap of the user's own, which the chart cannot read, as in NVIDIA's chart. A
simulated node asks nothing of the kind. */ -}}
{{- define "virgate.monitorsMIG" -}}
{{- if and .Values.mig.manage (eq "false" (toString .Values.mig.monitor)) -}}
{{- fail "mig.monitor: false, but mig.manage needs the same right: leave mig.monitor out" -}}
{{- end -}}
{{- if or .Values.mig.manage (eq "true" (toString .Values.mig.monitor)) -}}
true
{{- else if and (kindIs "invalid" .Values.mig.monitor) (not (regexMatch "^(sim|trace):" .Values.node)) -}}
{{- if .Values.migStrategy }}{{ if ne .Values.migStrategy "none" }}true{{ end }}{{ else if .Values.config.name }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- /* Whether the container makes partitions of a driver, which takes a privileged one. */ -}}
{{- define "virgate.makesPartitions" -}}
{{- if and .Values.mig.manage (not (hasPrefix "sim:" .Values.node)) }}true{{ end -}}
{{- end -}}

{{- /* Whether the container has SYS_ADMIN. */ -}}
{{- define "virgate.sysAdmin" -}}
{{- $security := .Values.securityContext | default dict -}}
{{- if $security -}}
{{- $add := get (get $security "capabilities" | default dict) "add" | default list -}}
{{- if or (get $security "privileged") (has "SYS_ADMIN" $add) (has "CAP_SYS_ADMIN" $add) (has "ALL" $add) }}true{{ end -}}
{{- else if or (eq .Values.driverAccess "privileged") .Values.mig.reset .Values.gpuSettings.manage -}}
true
{{- else -}}
{{- include "virgate.monitorsMIG" . -}}
{{- end -}}
{{- end -}}

{{- /* A container, but for its name, that takes from the node what Virgate has left there. */ -}}
{{- define "virgate.uninstall" -}}
image: {{ include "virgate.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [uninstall, --host, --node=$(NODE_NAME)]
env:
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- /* The image asks NVIDIA's runtime for all GPUs. This container needs no driver. */}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- with .Values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  seccompProfile: {type: RuntimeDefault}
  capabilities: {drop: [ALL]}
  {{- with .Values.seLinuxOptions }}
  seLinuxOptions:
    {{- toYaml . | nindent 4 }}
  {{- end }}
volumeMounts:
- {name: device-plugins, mountPath: /var/lib/kubelet/device-plugins}
{{- if include "virgate.writesSpecs" . }}
- {name: cdi, mountPath: /var/run/cdi}
{{- end }}
{{- if and .Values.featureLabels.enabled (eq .Values.featureLabels.output "nfd-file") }}
- {name: features, mountPath: /etc/kubernetes/node-feature-discovery/features.d}
{{- end }}
{{- end -}}

{{/* The name of the DRA driver. */}}
{{- define "virgate.draDriver" -}}
{{ ternary "gpu.nvidia.com" "gpu.virgate.github.io" .Values.dra.nvidiaNames }}
{{- end }}

{{- /* The labels of the nodes that the DaemonSet runs on, a line for each set of them, as
kubectl get nodes -l takes it; a line without any stands for all nodes. */ -}}
{{- define "virgate.nodes" -}}
{{- $all := list -}}
{{- range $key, $value := .Values.nodeSelector | default dict -}}{{- $all = append $all (printf "%s=%v" $key $value) -}}{{- end -}}
{{- $terms := .Values.affinity | default dict | dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" list -}}
{{- range $terms | default (list dict) }}
{{- $labels := $all -}}
{{- range get . "matchExpressions" | default list -}}
{{- $values := get . "values" | default list | join "," -}}
{{- $texts := dict "In" (printf (contains "," $values | ternary "%s in (%s)" "%s=%s") .key $values) "NotIn" (printf "%s notin (%s)" .key $values) "Exists" .key "DoesNotExist" (printf "!%s" .key) "Gt" (printf "%s>%s" .key $values) "Lt" (printf "%s<%s" .key $values) -}}
{{- $labels = append $labels (get $texts .operator) -}}
{{- end }}
{{ join "," $labels }}
{{- end -}}
{{- end -}}
