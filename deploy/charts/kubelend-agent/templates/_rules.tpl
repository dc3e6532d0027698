{{- define "agent.requestRules" -}}
- apiGroups: [rear.fluidos.eu]
  resources: [resourcerequests]
  verbs: [get, list, watch, patch]      # patch: its finalizer, so that nothing is forgotten
- apiGroups: [rear.fluidos.eu]
  resources: [resourcerequests/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{- define "agent.instructionRules" -}}
- apiGroups: [rear.fluidos.eu]
  resources: [reservationinstructions, providerinstructions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rear.fluidos.eu]
  resources: [reservationinstructions/status, providerinstructions/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{- /* Of placeholders, which are where ProviderInstructions are. */ -}}
{{- define "agent.placeholderRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [create, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [kubelend-agent-holds]
  verbs: [get, update]
{{- end }}

{{- define "agent.advertisementRules" -}}
- apiGroups: [rear.fluidos.eu]
  resources: [advertisements]
  verbs: [get, create, patch]
- apiGroups: [rear.fluidos.eu]
  resources: [advertisements/status]
  verbs: [patch]
{{- end }}

{{- /* A role in one namespace, and who has it. */ -}}
{{- define "agent.role" -}}
{{- $name := printf "%s-%s" (include "kubelend.name" .root) .what -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ .namespace }}
  labels: {{- include "kubelend.labels" .root | nindent 4 }}
rules:
{{ include (printf "agent.%sRules" .rules) .root }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ .namespace }}
  labels: {{- include "kubelend.labels" .root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
- {kind: ServiceAccount, name: {{ include "kubelend.account" .root }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}
