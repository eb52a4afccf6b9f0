{{- /* The variables of the container that serves: the chart's, but for those of which the values
have others, and the values'. */ -}}
{{- define "virgate.env" -}}
{{- $own := dict -}}
{{- range .root.Values.devicePlugin.containers.main.env -}}{{- $_ := set $own .name true -}}{{- end -}}
{{- $env := list -}}
{{- range include "virgate.chartEnv" . | fromYamlArray -}}
{{- if not (hasKey $own .name) -}}{{- $env = append $env . -}}{{- end -}}
{{- end -}}
{{- concat $env (.root.Values.devicePlugin.containers.main.env | default list) | toYaml -}}
{{- end -}}

{{- define "virgate.chartEnv" -}}
{{- $v := .root.Values }}
{{- $sysAdmin := include "virgate.sysAdmin" .root }}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if $v.dra.enabled }}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
{{- end }}
{{- if and $v.featureLabels.enabled (eq $v.featureLabels.output "nfd-api") }}
- name: NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- if ne $v.driverAccess "privileged" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: {{ include "virgate.allGPUs" .root }}}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
{{- /* NVIDIA's runtime starts no container that has these without SYS_ADMIN. */}}
{{- if and $v.mig.manage $sysAdmin }}
- {name: NVIDIA_MIG_CONFIG_DEVICES, value: all}
{{- end }}
{{- if and (include "virgate.monitorsMIG" .root) $sysAdmin }}
- {name: NVIDIA_MIG_MONITOR_DEVICES, value: all}
{{- end }}
{{- else }}
{{- /* The image asks NVIDIA's runtime for all GPUs. This container has the driver without it. */}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end }}
{{- range $name, $value := dict "MIG_STRATEGY" $v.migStrategy "FAIL_ON_INIT_ERROR" $v.failOnInitError "PASS_DEVICE_SPECS" $v.compatWithCPUManager
      "DEVICE_LIST_STRATEGY" (kindIs "slice" $v.deviceListStrategy | ternary ($v.deviceListStrategy | join ",") $v.deviceListStrategy) "DEVICE_ID_STRATEGY" $v.deviceIDStrategy "NVIDIA_DRIVER_ROOT" .driverRoot "NVIDIA_DEV_ROOT" $v.nvidiaDevRoot
      "GDRCOPY_ENABLED" $v.gdrcopyEnabled "GDS_ENABLED" $v.gdsEnabled "MOFED_ENABLED" $v.mofedEnabled "DEVICE_DISCOVERY_STRATEGY" $v.deviceDiscoveryStrategy
      "NVIDIA_CDI_HOOK_PATH" $v.cdi.nvidiaHookPath "CDI_FEATURE_FLAGS" $v.cdi.featureFlags }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end -}}
