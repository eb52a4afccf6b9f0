{{- /* Made from values.yaml by make manifest: what a value is that someone gave as null, which Helm
takes out of .Values. Left out is what goes to Kubernetes as it is, for which null means none. */ -}}
{{- define "virgate.defaults" -}}
{{- include "virgate.fill" (list .Values (include "virgate.preset" . | fromYaml)) -}}
{{- include "virgate.fill" (list .Values (include "virgate.defaultValues" . | fromYaml)) -}}
{{- end -}}

{{- /* Gives the first mapping what it lacks and the second one has. */ -}}
{{- define "virgate.fill" -}}
{{- $values := first . -}}
{{- range $name, $default := last . -}}
{{- if or (not (hasKey $values $name)) (kindIs "invalid" (get $values $name)) -}}
{{- $_ := set $values $name $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $name)) (ne $name "labels") -}}
{{- include "virgate.fill" (list (get $values $name) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "virgate.defaultValues" -}}
admission:
    gpusNeedRequest: false
    mostPerContainer: {}
    oneSharePerContainer: false
    ownNode: true
    resourceNames: []
    sharedResources: null
    sharesNeedNamespaceLabel: false
allowDefaultNamespace: false
cdi:
    featureFlags: null
    nvidiaHookPath: null
    specs: null
compatWithCPUManager: null
config:
    default: null
    examples: false
    fallbackStrategies:
        - named
        - single
    map: {}
    name: ""
    nodeLabel: nvidia.com/device-plugin.config
    rules: []
    rulesSpread: null
deviceDiscoveryStrategy: null
deviceIDStrategy: null
deviceListStrategy: null
devicePlugin:
    containers:
        main:
            env: []
    enableHostNetwork: false
    enabled: true
dra:
    enabled: false
    nvidiaNames: false
    resources: []
driverAccess: runtime
driverMounts:
    enabled: false
extraArgs: []
extraVolumeMounts: []
extraVolumes: []
failOnInitError: null
featureLabels:
    enabled: false
    models: false
    output: node
fullnameOverride: ""
gdrcopyEnabled: null
gdsEnabled: null
gpuSettings:
    manage: false
image:
    digest: ""
    pullPolicy: IfNotPresent
    repository: virgate
    tag: ""
imagePullSecrets: []
kubeletRootDir: /var/lib/kubelet
logFormat: text
logLevel: info
memoryGuard:
    evict: false
metrics:
    dashboard:
        enabled: false
        labels:
            grafana_dashboard: "1"
    perContainer: false
    podMonitor:
        enabled: false
        interval: 15s
        labels: {}
        scheme: http
        tlsConfig: {}
    port: 9400
    rules:
        disabled: []
        enabled: false
        labels: {}
        runbookURL: https://github.com/virgate/virgate/blob/main/docs/reference/runbook.md#
        thresholds: {}
mig:
    manage: false
    monitor: null
    pauseClients: false
    reset: false
migStrategy: null
mofedEnabled: null
mps:
    enabled: false
    multiUser: false
    root: /run/nvidia/mps
nameOverride: ""
namespaceOverride: ""
networkPolicy:
    enabled: null
    from: []
    namespaces: []
node: auto
nvidiaDevRoot: null
nvidiaDriverRoot: null
podAnnotations: {}
podLabels: {}
podSecurityContext: {}
preset: null
report:
    annotations: true
    condition: true
    events: true
    heartbeat: 5m
    removeStaleResources: false
runtimeClassName: null
seLinuxOptions: {}
securityContext: {}
selectorLabelsOverride: {}
serviceAccount:
    annotations: {}
standby:
    enabled: false
terminationGracePeriodSeconds: 10
uninstall: false
updateStrategy:
    rollingUpdate:
        maxSurge: 10%
        maxUnavailable: 0
    type: RollingUpdate
{{- end -}}
