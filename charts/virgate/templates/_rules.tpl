{{- /* The rules as the values have them: without the disabled alerts, with other thresholds and runbook. */ -}}
{{- define "virgate.rules" -}}
{{- $v := .Values.metrics.rules -}}
{{- $page := "https://github.com/virgate/virgate/blob/main/docs/reference/runbook.md#" -}}
{{- $alerts := list -}}{{- $withThreshold := list -}}{{- $groups := list -}}
{{- range $group := (.Files.Get "rules/virgate.rules.yaml" | fromYaml).groups -}}
{{- $rules := list -}}
{{- range $rule := $group.rules -}}
{{- with $rule.alert -}}
{{- $alerts = append $alerts . -}}
{{- if contains "# threshold" $rule.expr -}}{{- $withThreshold = append $withThreshold . -}}{{- end -}}
{{- if hasKey $v.thresholds . -}}
{{- $_ := set $rule "expr" (regexReplaceAll "[0-9.]+ # threshold" $rule.expr (printf "%v # threshold" (get $v.thresholds .))) -}}
{{- end -}}
{{- $_ := set $rule.annotations "runbook_url" ($rule.annotations.runbook_url | replace $page $v.runbookURL) -}}
{{- end -}}
{{- if not (has $rule.alert $v.disabled) -}}{{- $rules = append $rules $rule -}}{{- end -}}
{{- end -}}
{{- if $rules -}}{{- $groups = append $groups (dict "name" $group.name "rules" $rules) -}}{{- end -}}
{{- end -}}
{{- range $v.disabled -}}
{{- if not (has . $alerts) -}}{{- fail (printf "metrics.rules.disabled: no alert is called %s: there are %s" . (join ", " $alerts)) -}}{{- end -}}
{{- end -}}
{{- range $name, $_ := $v.thresholds -}}
{{- if not (has $name $withThreshold) -}}{{- fail (printf "metrics.rules.thresholds: %s: no alert of that name has a threshold: those that have are %s" $name (join ", " $withThreshold)) -}}{{- end -}}
{{- end -}}
{{- dict "groups" $groups | toYaml -}}
{{- end -}}
