{{- define "agent.hasCertificate" -}}
{{- if eq .Values.broker.transport "http" }}yes{{ end -}}
{{- end }}

{{- define "agent.joins" -}}
{{- if and (include "agent.hasCertificate" .) (eq .Values.certificate.from "join") }}yes{{ end -}}
{{- end }}

{{- define "agent.holds" -}}
{{- if and (eq .Values.hold.mode "placeholders") (ne .Values.broker.transport "none") }}yes{{ end -}}
{{- end }}

{{- /* The value of a class cannot be changed, so another value is another class. */ -}}
{{- define "agent.holdClass" -}}
kubelend-hold{{ with int64 .Values.hold.priority }}-{{ . }}{{ end }}
{{- end }}

{{- /* In policies. Not by its namespace, which a kustomization may change; but an account that others use too, such as
`default`, only in its own. */ -}}
{{- define "agent.isCaller" -}}
{{- if .Values.serviceAccount.create -}}
request.userInfo.username.startsWith('system:serviceaccount:') && request.userInfo.username.endsWith(':{{ include "kubelend.account" . }}')
{{- else -}}
request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:{{ include "kubelend.account" . }}'
{{- end -}}
{{- end }}

{{- /* The mode is decided here and not by the agent, so that it never needs a right that it does not have. Without a
cluster, as in `helm template`, nothing is known of Liqo: then auto is none, and --api-versions says otherwise. */ -}}
{{- define "agent.peering" -}}
{{- $peering := .Values.peering -}}
{{- if eq .Values.broker.transport "none" -}}
none
{{- else if ne $peering.mode "auto" -}}
{{ $peering.mode }}
{{- else if $peering.kubeconfigsSecret -}}
liqoctl
{{- else if .Capabilities.APIVersions.Has "core.liqo.io/v1beta1" -}}
liqo
{{- else -}}
none
{{- end -}}
{{- end }}

{{- /* What would only fail once it runs is refused here, with what to do. */ -}}
{{- define "agent.check" -}}
{{- if and (eq .Values.broker.transport "http") (not .Values.broker.url) }}
{{- fail "broker.url: is needed, for example https://broker.example.org:8443" }}
{{- end }}
{{- if and (eq .Values.broker.transport "kubernetes") (not .Values.broker.kubeconfigSecret) }}
{{- fail "broker.kubeconfigSecret: is needed with broker.transport=kubernetes; make it by: kubectl create secret generic broker-kubeconfig --from-file=kubeconfig" }}
{{- end }}
{{- if and (eq .Values.broker.transport "kubernetes") (not .Values.broker.namespace) }}
{{- fail "broker.namespace: is needed with broker.transport=kubernetes: the namespace of this cluster in the broker's cluster; create it with: kubelend create clusternamespace --cluster-id berlin | kubectl apply -f -" }}
{{- end }}
{{- if and (eq (include "agent.peering" .) "liqoctl") (not .Values.peering.kubeconfigsSecret) }}
{{- fail "peering.kubeconfigsSecret: is needed with peering.mode=liqoctl; make it by: kubectl create secret generic kubeconfigs --from-file=berlin.kubeconfig --from-file=paris.kubeconfig" }}
{{- end }}
{{- if include "agent.joins" . }}
{{- range $key := list "url" "clusterID" "caHash" }}
{{- if not (index $.Values.certificate.join $key) }}
{{- fail (printf "certificate.join.%s: is needed with certificate.from=join; `kubelend create token` prints it" $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (include "agent.hasCertificate" .) (eq .Values.certificate.from "certManager") }}
{{- if not (and .Values.certificate.certManager.clusterID .Values.certificate.certManager.issuer) }}
{{- fail "certificate.certManager: needs clusterID and issuer.name with certificate.from=certManager" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "agent.labels" -}}
{{- $pairs := list -}}
{{- range $key, $value := .Values.cluster.labels -}}{{- $pairs = append $pairs (printf "%s=%s" $key $value) -}}{{- end -}}
{{- join "," $pairs -}}
{{- end }}
