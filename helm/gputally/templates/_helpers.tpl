{{/* Name of the chart, or what the operator calls it. */}}
{{- define "gputally.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of every object: the release, and the chart where the release's name does not contain it.
41 characters: behind `-accountant` the StatefulSet's pods carry a hash, in a label of 63 in all. */}}
{{- define "gputally.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 41 | trimSuffix "-" -}}
{{- else if contains (include "gputally.name" .) .Release.Name -}}
{{- .Release.Name | trunc 41 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gputally.name" .) | trunc 41 | trimSuffix "-" -}}
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
{{- $name := trimPrefix "/" (printf "%s/%s" (trimSuffix "/" $root.Values.image.registry) $image.repository) -}}
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

{{/* Namespace of the agents: their own, else the release's. */}}
{{- define "gputally.agentNamespace" -}}
{{- default .Release.Namespace .Values.agent.namespace.name -}}
{{- end -}}

{{/* Namespace of a component: (list . "agent"). */}}
{{- define "gputally.namespace" -}}
{{- if eq (last .) "agent" -}}
{{- include "gputally.agentNamespace" (first .) -}}
{{- else -}}
{{- (first .).Release.Namespace -}}
{{- end -}}
{{- end -}}

{{/* Host name of the accountant's Service: what its certificate has to be for. */}}
{{- define "gputally.accountantHost" -}}
{{- printf "%s.%s.svc" (include "gputally.component" (list . "accountant")) .Release.Namespace -}}
{{- end -}}

{{/* Base URL of the accountant for agents, fairshare and jobs: the operator's, else our own Service. */}}
{{- define "gputally.accountantUrl" -}}
{{- if .Values.accountant.enabled -}}
{{- $scheme := empty .Values.accountant.tls.existingSecret | ternary "http" "https" -}}
{{- printf "%s://%s:%v" $scheme (include "gputally.accountantHost" .) .Values.accountant.service.port -}}
{{- else -}}
{{- required "accountant.externalUrl: needed where accountant.enabled is false" .Values.accountant.externalUrl -}}
{{- end -}}
{{- end -}}

{{/* Name of the ConfigMap with a component's file: (list . "accountant" "prices" .Values.accountant.prices). */}}
{{- define "gputally.fileConfigMap" -}}
{{- $file := index . 3 -}}
{{- default (printf "%s-%s" (include "gputally.component" (list (index . 0) (index . 1))) (index . 2)) $file.existingConfigMap -}}
{{- end -}}

{{/* Name of the ConfigMap with who signs in to the controller's pages: their own, else the accountant's; "" where nobody does. */}}
{{- define "gputally.pagesCallers" -}}
{{- $pages := .Values.fairshare.pages -}}
{{- if and .Values.fairshare.enabled $pages.enabled $pages.publicUrl -}}
{{- $own := or $pages.callers.text $pages.callers.existingConfigMap -}}
{{- $accountants := .Values.accountant.callers -}}
{{- if not (or $own (and .Values.accountant.enabled $accountants.text) $accountants.existingConfigMap) }}
{{- fail "fairshare.pages.publicUrl: people sign in with the issuers of a callers file: set fairshare.pages.callers or accountant.callers" }}
{{- end }}
{{- if not $pages.signIn.sessionKey.existingSecret }}
{{- fail "fairshare.pages.publicUrl: needs fairshare.pages.signIn.sessionKey.existingSecret, the key that all replicas sign sessions with" }}
{{- end }}
{{- if $own -}}
{{- include "gputally.fileConfigMap" (list . "fairshare" "callers" $pages.callers) -}}
{{- else -}}
{{- include "gputally.fileConfigMap" (list . "accountant" "callers" $accountants) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Authorities of the accountant's certificate, as a mount of whoever asks it. */}}
{{- define "gputally.authorityMount" -}}
{{- if .Values.accountant.authority.existingConfigMap }}
- name: authority
  mountPath: /etc/gputally/authority
  readOnly: true
{{- end }}
{{- end -}}

{{/* And as a volume. */}}
{{- define "gputally.authorityVolume" -}}
{{- with .Values.accountant.authority.existingConfigMap }}
- name: authority
  configMap:
    name: {{ . }}
    items:
      - key: {{ $.Values.accountant.authority.key }}
        path: ca.crt
{{- end }}
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

{{/* Pod security context that passes the Pod Security Standard "restricted". OpenShift gives every namespace ids of its
own and refuses others. */}}
{{- define "gputally.restrictedPod" -}}
runAsNonRoot: true
{{- if not .Values.openshift.enabled }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
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

{{/* Peers of a NetworkPolicy: pods of a component, in its namespace: (list . "agent" "fairshare"), the last being whose
policy this is. */}}
{{- define "gputally.peer" -}}
{{- $root := index . 0 -}}
{{- $there := include "gputally.namespace" (list $root (index . 1)) -}}
{{- if ne $there (include "gputally.namespace" (list $root (index . 2))) -}}
namespaceSelector:
  matchLabels:
    kubernetes.io/metadata.name: {{ $there }}
{{ end -}}
podSelector:
  matchLabels:
    {{- include "gputally.selectorLabels" (list $root (index . 1)) | nindent 4 }}
{{- end -}}

{{/* Egress to the cluster's name servers. */}}
{{- define "gputally.egressToNames" -}}
# Names.
- to:
    {{- toYaml .Values.networkPolicy.dns.to | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Egress to the address ranges of the values' networkPolicy, by what they are and why; nothing where there are none. */}}
{{- define "gputally.egressToCidrs" -}}
{{- $policy := index . 0 -}}
{{- with index $policy (printf "%sCidrs" (index . 1)) -}}
# {{ index $ 2 }}
- to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  ports:
    {{- range index $policy (printf "%sPorts" (index $ 1)) }}
    - port: {{ . }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Egress to the API server. */}}
{{- define "gputally.egressToApiServer" -}}
# The API server.
- to:
    - ipBlock:
        cidr: {{ .Values.networkPolicy.apiServerCidr }}
  ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - port: {{ . }}
    {{- end }}
{{- end -}}

{{/* Name of a claim of ours, or of the operator's: (list . "reports" .Values.reports.persistence). */}}
{{- define "gputally.claim" -}}
{{- default (include "gputally.component" (list (index . 0) (index . 1))) (index . 2).existingClaim -}}
{{- end -}}

{{/* A claim that outlives the release: (list . "reports" .Values.reports.persistence). */}}
{{- define "gputally.persistentVolumeClaim" -}}
{{- $values := index . 2 -}}
{{- if not $values.existingClaim }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "gputally.claim" . }}
  namespace: {{ (index . 0).Release.Namespace }}
  labels:
    {{- include "gputally.labels" (list (index . 0) (index . 1)) | nindent 4 }}
  annotations:
    # What is on it is the books; whoever removes the release decides about it on its own.
    helm.sh/resource-policy: keep
    {{- with $values.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with $values.storageClassName }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ $values.size }}
{{- end }}
{{- end -}}
