{{- /* The same in both charts: edit it in kubelend-broker, and `make deploy-manifests` copies it. */ -}}
{{- define "kubelend.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "kubelend.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kubelend.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{ include "kubelend.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ trimPrefix "kubelend-" .Chart.Name }}
app.kubernetes.io/part-of: kubelend
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kubelend.account" -}}
{{ .Values.serviceAccount.name | default (ternary (include "kubelend.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "kubelend.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kubelend.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kubelend.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kubelend.placement" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* A definition as it is in deploy/crds, with a word to Helm not to take it away. */ -}}
{{- define "kubelend.definition" -}}
{{- $text := .text | trim -}}
{{- if .keep -}}
{{- $text = $text | replace "\nmetadata:\n" "\nmetadata:\n  annotations: {helm.sh/resource-policy: keep}\n" -}}
{{- end -}}
{{ $text }}
{{- end }}

{{- /* Viewers and editors of one kind. */ -}}
{{- define "kubelend.roles" -}}
{{- $root := .root -}}
{{- $kind := . -}}
{{- range $who := .who }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ include "kubelend.name" $root }}-{{ $kind.plural }}-{{ $who }}
  labels:
    {{- include "kubelend.labels" $root | nindent 4 }}
    {{- if and $root.Values.rbac.aggregate (not $kind.alone) }}
    {{- range index $kind.into $who }}
    rbac.authorization.k8s.io/aggregate-to-{{ . }}: "true"
    {{- end }}
    {{- end }}
rules:
- apiGroups: [{{ $kind.group }}]
  resources: [{{ $kind.plural }}, {{ $kind.plural }}/status]
  verbs: [get, list, watch]
{{- if eq $who "editor" }}
- apiGroups: [{{ $kind.group }}]
  resources: [{{ $kind.plural }}]
  verbs: [create, update, patch, delete]
{{- end }}
{{- end }}
{{- end }}
