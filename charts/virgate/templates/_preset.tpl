{{- /* What the preset sets of the values that nobody has given. */ -}}
{{- define "virgate.preset" -}}
{{- if eq "gpu-operator" (get .Values "preset" | toString) -}}
cdi: {nvidiaHookPath: /usr/local/nvidia/toolkit/nvidia-cdi-hook}
deviceListStrategy: cdi-cri
nvidiaDriverRoot: /run/nvidia/driver
runtimeClassName: nvidia
{{- end -}}
{{- end -}}
