{{- /* What the preset sets of the values that nobody has given. */ -}}
{{- define "virgate.preset" -}}
{{- $preset := get .Values "preset" | toString -}}
{{- if has $preset (list "gpu-operator" "openshift") -}}
cdi: {nvidiaHookPath: /usr/local/nvidia/toolkit/nvidia-cdi-hook}
deviceListStrategy: cdi-cri
nvidiaDriverRoot: /run/nvidia/driver
runtimeClassName: nvidia
{{- end -}}
{{- if has $preset (list "selinux" "openshift") -}}
{{- /* A privileged container has no label of its own. */ -}}
{{- $mig := get .Values "mig" | default dict -}}
{{- if not (or (get $mig "manage") (eq "privileged" (get .Values "driverAccess" | toString)) (get .Values "securityContext")) -}}
{{ print "\n" }}seLinuxOptions: {type: container_device_plugin_t}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* All GPUs, as NVIDIA's runtime takes them. For "all" it opens each one, and starts no container when one fails. The
operator's spec of the management kind names device nodes by path. */ -}}
{{- define "virgate.allGPUs" -}}
{{- if has (get .Values "preset" | toString) (list "gpu-operator" "openshift") -}}
management.nvidia.com/gpu=all
{{- else -}}
all
{{- end -}}
{{- end -}}
