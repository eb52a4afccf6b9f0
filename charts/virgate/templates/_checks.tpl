{{- /* Adds to the list of problems what is wrong with a profile as far as its keys tell, which are
those of files/profile-keys.txt. It is called with the path for people, the path of the keys, the
value there, the keys and the problems. */ -}}
{{- define "virgate.checkKeys" -}}
{{- $shown := index . 0 -}}{{- $path := index . 1 -}}{{- $value := index . 2 -}}{{- $keys := index . 3 -}}{{- $problems := index . 4 -}}
{{- $mark := get $keys $path -}}
{{- $problem := "" -}}
{{- if kindIs "map" $value -}}
{{- if or (hasPrefix "{" $mark) (not $path) (hasKey $keys (printf "%s.NAME[]" $path)) -}}
{{- range $key, $inner := $value -}}
{{- $at := printf "%s.%s" $path (eq $path "mig.configs" | ternary "NAME" $key) | trimPrefix "." -}}
{{- if not (or (hasKey $keys $at) (hasKey $keys (printf "%s[]" $at))) -}}
{{- $_ := set $problems "all" (append $problems.all (printf "%s.%s: unknown key" $shown $key)) -}}
{{- else if not (kindIs "invalid" $inner) -}}
{{- include "virgate.checkKeys" (list (printf "%s.%s" $shown $key) $at $inner $keys $problems) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- else if hasKey $keys (printf "%s[]" $path) -}}
{{- range $i, $inner := kindIs "slice" $value | ternary $value list -}}
{{- include "virgate.checkKeys" (list (printf "%s[%d]" $shown $i) (printf "%s[]" $path) $inner $keys $problems) -}}
{{- end -}}
{{- if not (or (kindIs "slice" $value) (hasKey $keys $path)) -}}{{- $problem = "expected a list" -}}{{- end -}}
{{- else if eq $mark "{}" -}}
{{- $problem = "expected a mapping" -}}
{{- else if and $mark (ne $mark "{?}") (not (has (toString $value) (splitList " " $mark))) -}}
{{- $problem = printf "expected %s" (splitList " " $mark | join " or ") -}}
{{- end -}}
{{- if $problem -}}
{{- $_ := set $problems "all" (append $problems.all (printf "%s: %s: %s" $shown (toJson $value) $problem)) -}}
{{- end -}}
{{- end -}}

{{- /* Adds to the list of problems what is wrong with config.rules. It is called with the chart, the profiles and the
problems. Labels are those that configs/rules.go refuses. */ -}}
{{- define "virgate.checkChoice" -}}
{{- $root := index . 0 -}}{{- $config := $root.Values.config -}}{{- $profiles := index . 1 -}}{{- $problems := index . 2 -}}
{{- $rules := $config.rules | default list -}}
{{- if hasKey ($config.map | default dict) "virgate-rules" -}}
{{- $_ := set $problems "all" (append $problems.all "config.map.virgate-rules: rules are no profile: set config.rules") -}}
{{- end -}}
{{- if and $config.rulesSpread (not $rules) -}}
{{- $_ := set $problems "all" (append $problems.all "config.rulesSpread: there are no config.rules, which it belongs to") -}}
{{- end -}}
{{- if and $rules $config.name -}}
{{- $_ := set $problems "all" (append $problems.all (printf "config.rules: the ConfigMap %s of config.name has its own, under the key virgate-rules" $config.name)) -}}
{{- else if and $rules (not $profiles) -}}
{{- $_ := set $problems "all" (append $problems.all "config.rules: there are no profiles: set config.map, or leave config.default out") -}}
{{- else -}}
{{- range $i, $rule := $rules -}}
{{- $at := printf "config.rules[%d]" $i -}}{{- $number := add1 $i -}}
{{- $profile := fromYaml (get $profiles $rule.profile | default "") -}}
{{- if or (not (hasKey $profiles $rule.profile)) (hasKey $profile "mig-configs") -}}
{{- $hint := "" -}}
{{- if and (not $config.map) ($root.Files.Get (printf "examples/%s.yaml" $rule.profile)) -}}{{- $hint = "; set config.examples: true, which adds it" -}}{{- end -}}
{{- $_ := set $problems "all" (append $problems.all (printf "%s.profile: rule %d: %s no profile %q: there are %s%s" $at $number (empty $config.map | ternary "the chart has" "config.map has") $rule.profile (keys $profiles | sortAlpha | join ", ") $hint)) -}}
{{- else if and $rule.mig (ne "true" (include "virgate.at" (list $profile "mig" "manage"))) -}}
{{- $_ := set $problems "all" (append $problems.all (printf "%s.mig: rule %d: the profile %s does not have mig.manage: true, so Virgate makes no MIG layout" $at $number $rule.profile)) -}}
{{- end -}}
{{- $labels := keys ($rule.nodeSelector | default dict) | sortAlpha -}}
{{- range $rule.matchExpressions | default list -}}{{- $labels = append $labels .key -}}{{- end -}}
{{- range $label := $labels -}}
{{- if and (not (regexMatch "^nvidia[.]com/gpu[.](product|memory|model[.].+)$" $label)) (regexMatch "^nvidia[.]com/(mig-.*|.+[.](product|count|replicas|sharing-strategy|memory|multiprocessors|slices[.](gi|ci)|engines[.](copy|decoder|encoder|jpeg|ofa))|mig[.]strategy|mps[.]capable|gfd[.]timestamp|device-plugin[.]config([.]state)?|mig[.]config[.]state|gpu[.]deploy[.].+)$" $label) -}}
{{- $_ := set $problems "all" (append $problems.all (printf "%s: rule %d: rules must not use the label %s, which %s" $at $number $label (hasPrefix "nvidia.com/gpu.deploy." $label | ternary "changes while a MIG layout is changed or the driver is replaced" "depends on the profile"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The value at a path of a profile, as JSON; null where there is none. */ -}}
{{- define "virgate.at" -}}
{{- $value := index . 0 -}}
{{- range rest . -}}{{- $value = kindIs "map" $value | ternary (get (kindIs "map" $value | ternary $value dict) .) "" -}}{{- end -}}
{{- toJson $value -}}
{{- end -}}

{{- /* What a profile needs of the chart, as JSON: each key that needs something, and the value
that has to be true for it. What has no effect on the program needs nothing. */ -}}
{{- define "virgate.needs" -}}
{{- $needs := dict -}}
{{- range $way := list "timeSlicing" "mps" -}}
{{- $entries := include "virgate.at" (list $ "sharing" $way "resources") | fromJsonArray -}}
{{- range $i, $entry := $entries -}}
{{- if kindIs "map" $entry -}}
{{- $at := printf "sharing.%s.resources[%d]" $way $i -}}
{{- if and (eq $way "mps") (ne "1" (get $entry "replicas" | toString)) -}}{{- $_ := set $needs "sharing.mps" "mps.enabled" -}}{{- end -}}
{{- range $key := list "timeSlice" "computeMode" -}}
{{- if get $entry $key -}}{{- $_ := set $needs (printf "%s.%s" $at $key) "gpuSettings.manage" -}}{{- end -}}
{{- end -}}
{{- if get $entry "memory" -}}{{- $_ := set $needs (printf "%s.memory" $at) "metrics.perContainer" -}}{{- end -}}
{{- if eq "\"evict\"" (include "virgate.at" (list $entry "memory" "action")) -}}{{- $_ := set $needs (printf "%s.memory.action: evict" $at) "memoryGuard.evict" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq "true" (include "virgate.at" (list . "mig" "manage")) -}}
{{- $_ := set $needs "mig.manage" "mig.manage" -}}
{{- if eq "true" (include "virgate.at" (list . "mig" "reset")) -}}{{- $_ := set $needs "mig.reset" "mig.reset" -}}{{- end -}}
{{- end -}}
{{- if not (has (include "virgate.at" (list . "dra" "resources")) (list "null" "\"\"" "[]")) -}}{{- $_ := set $needs "dra.resources" "dra.enabled" -}}{{- end -}}
{{- toJson $needs -}}
{{- end -}}
