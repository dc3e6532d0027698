{{- /* What the pod of the agent and the one that cleans up after it have in common. */ -}}
{{- define "agent.flags" -}}
- --source=kubernetes
- --broker-transport={{ .Values.broker.transport | replace "none" "" }}
{{- if eq .Values.broker.transport "http" }}
- --broker-cert-path={{ ternary "/var/lib/kubelend/certs" "/etc/kubelend/tls" (include "agent.joins" . | eq "yes") }}
{{- end }}
{{- if eq .Values.broker.transport "kubernetes" }}
- --broker-kubeconfig=/etc/kubelend/broker/kubeconfig
- --broker-namespace={{ .Values.broker.namespace }}
{{- end }}
{{- with .Values.cluster.id }}
- --cluster-id={{ . }}
{{- end }}
{{- with .Values.cluster.name }}
- {{ printf "--cluster-name=%s" . | quote }}
{{- end }}
{{- with .Values.cluster.region }}
- {{ printf "--region=%s" . | quote }}
{{- end }}
{{- with .Values.cluster.endpointURL }}
- --endpoint-url={{ . }}
{{- end }}
{{- with include "agent.labels" . }}
- {{ printf "--labels=%s" . | quote }}
{{- end }}
{{- range $what, $price := omit .Values.prices "currency" }}
- --{{ $what }}-cost={{ $price }}
{{- end }}
{{- with .Values.prices.currency }}
- --currency={{ . }}
{{- end }}
{{- if .Values.policy }}
- --policy-file=/etc/kubelend/policy/policy.yaml
{{- end }}
- --advertisement-namespace={{ .Values.namespaces.advertisement | default "$(POD_NAMESPACE)" }}
- --instruction-namespace={{ .Values.namespaces.instructions | default "$(POD_NAMESPACE)" }}
{{- if include "agent.holds" . }}
- --hold=placeholders
- --hold-priority-class={{ include "agent.holdClass" . }}
{{- with .Values.hold.image }}
- --hold-image={{ . }}
{{- end }}
{{- end }}
- --peering={{ include "agent.peering" . }}
{{- if eq (include "agent.peering" .) "liqo" }}
- --liqo-namespace={{ .Values.peering.liqoNamespace }}
{{- end }}
{{- if eq (include "agent.peering" .) "liqoctl" }}
- --kubeconfigs-dir=/etc/kubelend/kubeconfigs
{{- end }}
{{- with .Values.namespaces.requests }}
- --request-namespace={{ . }}
{{- end }}
- --health-probe-bind-address=:8081
- --metrics-bind-address=:8080
- --log-level={{ .Values.logLevel }}
{{- range $name, $value := .Values.flags }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}

{{- define "agent.environment" -}}
{{- if eq .Values.broker.transport "http" }}
- {name: KUBELEND_BROKER_URL, value: {{ .Values.broker.url | quote }}}
{{- end }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{- define "agent.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if include "agent.joins" . }}
- {name: certs, mountPath: /var/lib/kubelend}
{{- else if include "agent.hasCertificate" . }}
- {name: tls, mountPath: /etc/kubelend/tls, readOnly: true}
{{- end }}
{{- if eq .Values.broker.transport "kubernetes" }}
- {name: broker, mountPath: /etc/kubelend/broker, readOnly: true}
{{- end }}
{{- if eq (include "agent.peering" .) "liqoctl" }}
- {name: kubeconfigs, mountPath: /etc/kubelend/kubeconfigs, readOnly: true}
{{- end }}
{{- if .Values.policy }}
- {name: policy, mountPath: /etc/kubelend/policy, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "agent.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if include "agent.joins" . }}
- name: certs
  persistentVolumeClaim: {claimName: {{ include "kubelend.name" . }}}
{{- else if include "agent.hasCertificate" . }}
- name: tls
  secret: {secretName: {{ .Values.certificate.secret }}, defaultMode: 0440}
{{- end }}
{{- if eq .Values.broker.transport "kubernetes" }}
- name: broker
  secret: {secretName: {{ .Values.broker.kubeconfigSecret }}, defaultMode: 0440}
{{- end }}
{{- if eq (include "agent.peering" .) "liqoctl" }}
- name: kubeconfigs
  secret: {secretName: {{ .Values.peering.kubeconfigsSecret }}, defaultMode: 0440}
{{- end }}
{{- if .Values.policy }}
- name: policy
  configMap: {name: {{ include "kubelend.name" . }}-policy}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "agent.cleanupHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
