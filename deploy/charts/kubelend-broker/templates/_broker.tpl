{{- /* Whether the broker speaks to the API server at all: if not, it gets neither roles nor a token. */ -}}
{{- define "broker.usesApi" -}}
{{- if or (include "broker.keepsObjects" .) .Values.clusterNamespaces }}yes{{ end -}}
{{- end }}

{{- /* Whether its ledger is in the cluster. */ -}}
{{- define "broker.keepsObjects" -}}
{{- if eq .Values.store.kind "kubernetes" }}yes{{ end -}}
{{- end }}

{{- define "broker.servesHttp" -}}
{{- if has "http" .Values.interfaces }}yes{{ end -}}
{{- end }}

{{- define "broker.servesObjects" -}}
{{- if has "kubernetes" .Values.interfaces }}yes{{ end -}}
{{- end }}

{{- /* Whether calls have to be sent to one of several. */ -}}
{{- define "broker.leaderOnly" -}}
{{- if and (gt (int .Values.replicas) 1) .Values.service.leaderOnly (include "broker.servesHttp" .) }}yes{{ end -}}
{{- end }}

{{- define "broker.authority" -}}
{{- if .Values.enrolment.enabled -}}
{{- .Values.authority.secret | default (ternary (printf "%s-ca" (include "kubelend.name" .)) "" (include "broker.ownIssuer" . | eq "yes")) -}}
{{- end -}}
{{- end }}

{{- define "broker.ownIssuer" -}}
{{- if and .Values.certManager.enabled (not .Values.certManager.issuer) }}yes{{ end -}}
{{- end }}

{{- /* What would only fail once it runs is refused here, with what to do. */ -}}
{{- define "broker.check" -}}
{{- if and (gt (int .Values.replicas) 1) (ne .Values.store.kind "kubernetes") }}
{{- fail (printf "replicas: %d brokers cannot share a store of kind %s; set store.kind=kubernetes" (int .Values.replicas) .Values.store.kind) }}
{{- end }}
{{- if and (gt (int .Values.replicas) 1) (not .Values.grantKey.secret) }}
{{- fail "grantKey.secret: several brokers have to sign with one key; make it by: openssl genpkey -algorithm ed25519 -out grants.key && kubectl create secret generic broker-grant-key --from-file=grants.key" }}
{{- end }}
{{- if and (include "broker.servesObjects" .) (ne .Values.store.kind "kubernetes") }}
{{- fail "interfaces: the objects of kubernetes are the store as well; set store.kind=kubernetes" }}
{{- end }}
{{- if and .Values.enrolment.enabled (not (include "broker.servesHttp" .)) }}
{{- fail "enrolment.enabled: clusters join over http; add http to interfaces" }}
{{- end }}
{{- if and .Values.enrolment.enabled (not (include "broker.authority" .)) }}
{{- fail "authority.secret: is needed with enrolment.enabled; make it by: kubelend ca init && kubectl create secret generic broker-ca --from-file=ca" }}
{{- end }}
{{- end }}
