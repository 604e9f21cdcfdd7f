{{- define "kvladder.labels" -}}
app.kubernetes.io/name: kvladder
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "kvladder.selector" -}}
app.kubernetes.io/name: kvladder
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "kvladder.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* Return a size in bytes. It is written as kvladder or as Kubernetes writes sizes. */}}
{{- define "kvladder.bytes" -}}
{{- $text := .size -}}
{{- if not (kindIs "string" $text) -}}
{{- int64 $text -}}
{{- else -}}
{{- $scales := dict "" 1 "k" 1000 "m" 1000000 "g" 1000000000 "t" 1000000000000 "ki" 1024 "mi" 1048576 "gi" 1073741824 "ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text | lower | trimSuffix "b" -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text -}}
{{- if or (not $number) (not (hasKey $scales $unit)) -}}
{{- fail (printf "%s: %s is not a size; write it like 8 GiB or 8Gi" .path $text) -}}
{{- end -}}
{{- mulf (float64 $number) (get $scales $unit) | int64 -}}
{{- end -}}
{{- end -}}

{{/* Return the tiers of a stack that the chart adds: the servers, Redis and Mooncake. */}}
{{- define "kvladder.added" -}}
{{- $added := list -}}
{{- $codecs := dict -}}
{{- if .Values.encryption.secret -}}
{{- $codecs = dict "codecs" (list "aes-gcm") -}}
{{- end -}}
{{- if .Values.server.enabled -}}
{{- $servers := list -}}
{{- $service := printf "%s-server" .Release.Name -}}
{{- if eq .Values.server.kind "DaemonSet" -}}
{{- $servers = append $servers (printf "%s.%s.svc:%d" $service .Release.Namespace (int .Values.server.port)) -}}
{{- else -}}
{{- range $i := until (int .Values.server.replicas) -}}
{{- $servers = append $servers (printf "%s-%d.%s.%s.svc:%d" $service $i $service $.Release.Namespace (int $.Values.server.port)) -}}
{{- end -}}
{{- end -}}
{{- $tier := dict "name" "servers" "type" "nixl" "servers" $servers "keys" "/run/keys/client.keys" "capacity" .Values.server.capacity "when" "commit" -}}
{{- $added = append $added (merge $tier $codecs) -}}
{{- end -}}
{{- if .Values.redis.secret -}}
{{- $tier := dict "name" "redis" "type" "redis" "url" "${KVLADDER_REDIS_URL}" "capacity" .Values.redis.capacity "when" "commit" -}}
{{- $added = append $added (merge $tier $codecs) -}}
{{- end -}}
{{- if .Values.mooncake.master -}}
{{- $tier := dict "name" "mooncake" "type" "mooncake" "master" .Values.mooncake.master "host" "${POD_IP}" "capacity" .Values.mooncake.capacity "when" "commit" -}}
{{- if .Values.mooncake.admin -}}
{{- $tier = merge $tier (dict "admin" .Values.mooncake.admin) -}}
{{- end -}}
{{- $added = append $added (merge $tier $codecs) -}}
{{- end -}}
{{- dict "tiers" $added | toJson -}}
{{- end -}}

{{/* Return tiers whose codec aes-gcm reads its key from the file of the Secret. */}}
{{- define "kvladder.withKey" -}}
{{- $tiers := list -}}
{{- $file := printf "/run/secrets/encryption/%s" .encryption.key -}}
{{- range $tier := .tiers -}}
{{- $codecs := list -}}
{{- range $codec := $tier.codecs -}}
{{- if eq (toString $codec) "aes-gcm" -}}
{{- $codec = dict "name" $codec "key_file" $file -}}
{{- end -}}
{{- $codecs = append $codecs $codec -}}
{{- end -}}
{{- $tiers = append $tiers (ternary (set (deepCopy $tier) "codecs" $codecs) $tier (not (empty $codecs))) -}}
{{- end -}}
{{- dict "tiers" $tiers | toJson -}}
{{- end -}}

{{- define "kvladder.engineStack" -}}
{{- $stack := deepCopy .Values.engine.stack -}}
{{- $added := (include "kvladder.added" . | fromJson).tiers -}}
{{- $with := dict "tiers" (concat $stack.tiers $added) "encryption" .Values.encryption -}}
{{- $_ := set $stack "tiers" (include "kvladder.withKey" $with | fromJson).tiers -}}
{{- $_ := set $stack "control" "/run/kvladder/kv.sock" -}}
{{- toYaml $stack -}}
{{- end -}}

{{- define "kvladder.serverStack" -}}
{{- $stack := deepCopy .Values.server.stack -}}
{{- $_ := set $stack "export" (dict "listen" (printf "0.0.0.0:%d" (int .Values.server.port)) "keys" "/run/keys/server.keys") -}}
{{- $_ := set $stack "control" "/run/kvladder/kv.sock" -}}
{{- if .Values.http.secret -}}
{{- $_ := set $stack "http" (dict "listen" (printf "0.0.0.0:%d" (int .Values.http.port)) "token_file" (printf "/run/secrets/http/%s" .Values.http.key)) -}}
{{- end -}}
{{- toYaml $stack -}}
{{- end -}}

{{- define "kvladder.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# "Always" would open the directories of files to the group, and kvladder refuses such directories
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvladder.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Copy keys: a Secret's files are open to the group, and kvladder wants keys for its user alone. */}}
{{- define "kvladder.keysInit" -}}
- name: keys
  image: {{ .image }}
  command: [install, -m, "0600", /secret/{{ .file }}, /run/keys/{{ .file }}]
  securityContext: {{- include "kvladder.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: secret, mountPath: /secret, readOnly: true}
    - {name: keys, mountPath: /run/keys}
{{- end -}}

{{- define "kvladder.keysVolumes" -}}
- name: secret
  secret: {secretName: {{ .secret }}, defaultMode: 0440, items: [{key: {{ .file }}, path: {{ .file }}}]}
- name: keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end -}}

{{/* Secrets as files: Kubernetes renews them in a running pod, and kvladder reads them again. */}}
{{- define "kvladder.secretMounts" -}}
{{- range $name, $secret := . }}
- {name: {{ $name }}-secret, mountPath: {{ $secret.path }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvladder.secretVolumes" -}}
{{- range $name, $secret := . }}
- name: {{ $name }}-secret
  secret:
    secretName: {{ $secret.secret }}
    defaultMode: 0440
    {{- with $secret.key }}
    items: [{key: {{ . }}, path: {{ . }}}]
    {{- end }}
{{- end }}
{{- end -}}

{{/* Return the Secrets that a part reads as files, by name. */}}
{{- define "kvladder.secretFiles" -}}
{{- $found := dict -}}
{{- if and (eq .part "engine") .root.Values.encryption.secret -}}
{{- $_ := set $found "encryption" (dict "secret" .root.Values.encryption.secret "key" .root.Values.encryption.key "path" "/run/secrets/encryption") -}}
{{- end -}}
{{- if and (eq .part "server") .root.Values.http.secret -}}
{{- $_ := set $found "http" (dict "secret" .root.Values.http.secret "key" .root.Values.http.key "path" "/run/secrets/http") -}}
{{- end -}}
{{- with (index .root.Values .part).secretFiles -}}
{{- $_ := set $found "files" (dict "secret" . "key" "" "path" "/run/secrets/files") -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{- define "kvladder.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end -}}
