{{/* Name of the chart, or what the operator calls it. */}}
{{- define "gputally.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of every object: the release, and the chart where the release's name does not contain it.
50 characters, so that `-accountant-tokens` still fits into the 63 of a DNS label. */}}
{{- define "gputally.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 44 | trimSuffix "-" -}}
{{- else if contains (include "gputally.name" .) .Release.Name -}}
{{- .Release.Name | trunc 44 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gputally.name" .) | trunc 44 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's objects: (list . "agent"). */}}
{{- define "gputally.component" -}}
{{- printf "%s-%s" (include "gputally.fullname" (first .)) (last .) -}}
{{- end -}}

{{/* What never changes, so that a selector can be made of it: (list . "agent"). */}}
{{- define "gputally.selectorLabels" -}}
app.kubernetes.io/name: {{ include "gputally.name" (first .) }}
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end -}}

{{/* Labels of every object: (list . "agent"). */}}
{{- define "gputally.labels" -}}
{{- $root := first . -}}
{{ include "gputally.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gputally
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Image of a component: (list . .Values.agent.image). A digest wins over a tag. */}}
{{- define "gputally.image" -}}
{{- $root := first . -}}
{{- $image := last . -}}
{{- $name := trimPrefix "/" (printf "%s/%s" $root.Values.image.registry $image.repository) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's ServiceAccount: (list . "agent"). */}}
{{- define "gputally.serviceAccountName" -}}
{{- $account := (index (first .).Values (last .)).serviceAccount -}}
{{- if $account.create -}}
{{- default (include "gputally.component" .) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{/* Base URL of the accountant for agents and fairshare: the operator's, else our own Service. */}}
{{- define "gputally.accountantUrl" -}}
{{- if .Values.accountant.enabled -}}
{{- printf "http://%s.%s.svc:%v" (include "gputally.component" (list . "accountant")) .Release.Namespace .Values.accountant.service.port -}}
{{- else -}}
{{- required "accountant.externalUrl: needed where accountant.enabled is false" .Values.accountant.externalUrl -}}
{{- end -}}
{{- end -}}

{{/* Name of the ConfigMap with a component's file: (list . "accountant" "prices" .Values.accountant.prices). */}}
{{- define "gputally.fileConfigMap" -}}
{{- $file := index . 3 -}}
{{- default (printf "%s-%s" (include "gputally.component" (list (index . 0) (index . 1))) (index . 2)) $file.existingConfigMap -}}
{{- end -}}

{{/* Placement and identity that all pods share: (list . .Values.agent). */}}
{{- define "gputally.podPlacement" -}}
{{- $root := first . -}}
{{- $values := last . -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Pod security context that passes the Pod Security Standard "restricted". */}}
{{- define "gputally.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Container security context that passes the Pod Security Standard "restricted". */}}
{{- define "gputally.restrictedContainer" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}
