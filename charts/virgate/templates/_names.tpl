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

{{- /* The profile of nodes without a label. None is known of a ConfigMap of the
user's own, whose one profile or whose profile "default" the program finds. */ -}}
{{- define "virgate.defaultProfile" -}}
{{- $config := .Values.config -}}
{{- if and (kindIs "invalid" $config.default) (not $config.name) (not $config.map) -}}
time-slicing-4
{{- else -}}
{{- default "" $config.default -}}
{{- end -}}
{{- end -}}

{{- /* The ConfigMap with the profiles; empty when there is none. */ -}}
{{- define "virgate.configMap" -}}
{{- if and .Values.config.name .Values.config.map -}}
{{- fail "config: name and map exclude each other" -}}
{{- else if .Values.config.name -}}
{{- .Values.config.name -}}
{{- else if or .Values.config.map (include "virgate.defaultProfile" .) -}}
{{- include "virgate.fullname" . }}-profiles
{{- end -}}
{{- end -}}

{{- define "virgate.writesSpecs" -}}
{{- if kindIs "bool" .Values.cdi.specs -}}
{{- if .Values.cdi.specs }}true{{ end -}}
{{- else if contains "cdi-" (default "" .Values.deviceListStrategy | toString) -}}
true
{{- end -}}
{{- end -}}
