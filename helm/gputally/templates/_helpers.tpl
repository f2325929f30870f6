{{/* Name of the chart, or the value nameOverride. */}}
{{- define "gputally.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of every object: the release's name, with the chart's name unless the release's name contains it.
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

{{/* Namespace of everything except the agents. */}}
{{- define "gputally.releaseNamespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{/* Name of a component's objects: (list . "agent"). */}}
{{- define "gputally.component" -}}
{{- printf "%s-%s" (include "gputally.fullname" (first .)) (last .) -}}
{{- end -}}

{{/* Labels for selectors, which never change: (list . "agent"). */}}
{{- define "gputally.selectorLabels" -}}
app.kubernetes.io/name: {{ include "gputally.name" (first .) }}
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end -}}

{{/* Labels of every object: (list . "agent"). */}}
{{- define "gputally.labels" -}}
{{- $root := first . -}}
{{- $chart := printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- $usual := dict "app.kubernetes.io/version" $root.Chart.AppVersion "app.kubernetes.io/part-of" "gputally" "app.kubernetes.io/managed-by" $root.Release.Service "helm.sh/chart" $chart -}}
{{- merge (include "gputally.selectorLabels" . | fromYaml) $root.Values.commonLabels $usual | toYaml -}}
{{- end -}}

{{/* Labels of a component's pods: (list . "agent" .Values.agent). Values cannot replace the selector's labels. */}}
{{- define "gputally.podLabels" -}}
{{- $own := (last .).podLabels -}}
{{- if kindIs "slice" $own -}}
{{- fail (printf "%s.podLabels: labels of the pods themselves, a map. The list of pod labels that reach the ledger is agent.exportPodLabels: rename it" (index . 1)) -}}
{{- end -}}
{{- merge (include "gputally.labels" (initial .) | fromYaml) (default dict $own) | toYaml -}}
{{- end -}}

{{/* Image of a component: (list . .Values.agent.image). A digest wins over a tag. A repository that begins with a host
is a full name. */}}
{{- define "gputally.image" -}}
{{- $root := first . -}}
{{- $image := last . -}}
{{- $name := $image.repository -}}
{{- if not (regexMatch "^(localhost|[^/]+[.:][^/]*)/" $name) -}}
{{- $registry := default $root.Values.image.registry (default dict $root.Values.global).imageRegistry | trimSuffix "/" -}}
{{- if not $registry -}}
{{- fail (printf "image.registry: is empty, and no other registry has an image %s: name the registry that holds the images (docs/images.md), or put it into the repository" $name) -}}
{{- end -}}
{{- $name = printf "%s/%s" $registry $name -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's ServiceAccount: (list . "agent"). */}}
{{- define "gputally.serviceAccountName" -}}
{{- $account := default (dict "create" true) (index (first .).Values (last .)).serviceAccount -}}
{{- if $account.create -}}
{{- default (include "gputally.component" .) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{/* Namespace of the agents: `agent.namespace.name`, else the release's. */}}
{{- define "gputally.agentNamespace" -}}
{{- default (include "gputally.releaseNamespace" .) .Values.agent.namespace.name -}}
{{- end -}}

{{/* Namespace of a component: (list . "agent"). */}}
{{- define "gputally.namespace" -}}
{{- if eq (last .) "agent" -}}
{{- include "gputally.agentNamespace" (first .) -}}
{{- else -}}
{{- include "gputally.releaseNamespace" (first .) -}}
{{- end -}}
{{- end -}}

{{/* Host name of the accountant's Service, which its certificate must name. */}}
{{- define "gputally.accountantHost" -}}
{{- printf "%s.%s.svc" (include "gputally.component" (list . "accountant")) (include "gputally.releaseNamespace" .) -}}
{{- end -}}

{{/* Source of the accountant's certificate: secret, cert-manager or self-signed; "" for plain HTTP. */}}
{{- define "gputally.tlsMode" -}}
{{- $tls := .Values.accountant.tls -}}
{{- if and .Values.accountant.enabled $tls.enabled -}}
{{- $mode := "self-signed" -}}
{{- if $tls.existingSecret -}}
{{- $mode = "secret" -}}
{{- else if $tls.certManager.issuerRef.name -}}
{{- $mode = "cert-manager" -}}
{{- else if $tls.clientCertificates -}}
{{- fail "accountant.tls.clientCertificates: the self-signed authority gives no client a certificate: set accountant.tls.existingSecret or accountant.tls.certManager.issuerRef" -}}
{{- end -}}
{{- $mode -}}
{{- else if and .Values.accountant.enabled $tls.existingSecret -}}
{{- fail "accountant.tls.existingSecret: accountant.tls.enabled is false: set one of them" -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the accountant's certificate. */}}
{{- define "gputally.tlsSecret" -}}
{{- default (printf "%s-tls" (include "gputally.component" (list . "accountant"))) .Values.accountant.tls.existingSecret -}}
{{- end -}}

{{/* Name of the ConfigMap with the authorities of the accountant's certificate; "" if the images' own list is trusted. */}}
{{- define "gputally.authority" -}}
{{- if eq (include "gputally.tlsMode" .) "self-signed" -}}
{{- include "gputally.component" (list . "authority") -}}
{{- else -}}
{{- .Values.accountant.authority.existingConfigMap -}}
{{- end -}}
{{- end -}}

{{/* Key in that ConfigMap. */}}
{{- define "gputally.authorityKey" -}}
{{- eq (include "gputally.tlsMode" .) "self-signed" | ternary "ca.crt" .Values.accountant.authority.key -}}
{{- end -}}

{{/* Secret with the token file; "" if there is none. */}}
{{- define "gputally.tokensSecret" -}}
{{- $tokens := .Values.accountant.tokens -}}
{{- if $tokens.existingSecret -}}
{{- $tokens.existingSecret -}}
{{- else if and $tokens.create .Values.accountant.enabled -}}
{{- include "gputally.component" (list . "accountant-tokens") -}}
{{- end -}}
{{- end -}}

{{/* Key in that Secret. */}}
{{- define "gputally.tokensKey" -}}
{{- empty .Values.accountant.tokens.existingSecret | ternary "tokens.yaml" .Values.accountant.tokens.key -}}
{{- end -}}

{{/* Secret with the bearer token of a component: (list . "fairshare"); "" if it sends a projected token. */}}
{{- define "gputally.tokenSecret" -}}
{{- $root := first . -}}
{{- $accountant := $root.Values.accountant -}}
{{- $token := default dict (index $root.Values (last .)).token -}}
{{- if $token.existingSecret -}}
{{- $token.existingSecret -}}
{{- else if and $accountant.enabled $accountant.tokens.create (not $accountant.kubernetesApi) (has (last .) (list "fairshare" "backup" "report")) -}}
{{- printf "%s-token" (include "gputally.component" .) -}}
{{- end -}}
{{- end -}}

{{/* "true" if a component sends the accountant a projected token of its ServiceAccount: (list . "agent"). It sends the
token of a Secret if the values name one. */}}
{{- define "gputally.projected" -}}
{{- $root := first . -}}
{{- $values := index $root.Values (last .) -}}
{{- if and $values.enabled $values.token (not (include "gputally.tokenSecret" .)) -}}
{{- $accountant := $root.Values.accountant -}}
{{- if and $accountant.enabled (not (or $accountant.kubernetesApi $accountant.callers.text $accountant.callers.existingConfigMap)) -}}
{{- fail (printf "%s.token: the accountant cannot have a service account token reviewed without accountant.kubernetesApi: switch it on, or name a Secret in %s.token.existingSecret" (last .) (last .)) -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* Volume with the token that a component sends to the accountant: (list . "agent" "0400"). */}}
{{- define "gputally.tokenVolume" -}}
{{- $root := index . 0 -}}
{{- $token := (index $root.Values (index . 1)).token -}}
- name: token
  {{- if include "gputally.projected" (list $root (index . 1)) }}
  projected:
    defaultMode: {{ index . 2 }}
    sources:
      - serviceAccountToken:
          path: token
          audience: {{ $root.Values.agent.token.audience }}
          expirationSeconds: 3607
  {{- else }}
  secret:
    secretName: {{ include "gputally.tokenSecret" (list $root (index . 1)) }}
    defaultMode: {{ index . 2 }}
    items:
      - key: {{ empty $token.existingSecret | ternary "token" $token.key }}
        path: token
  {{- end }}
{{- end -}}

{{/* The callers file of the values, with the chart's own programs by their ServiceAccounts; "" if there is none. */}}
{{- define "gputally.callers" -}}
{{- $accountant := .Values.accountant -}}
{{- if not $accountant.kubernetesApi -}}
{{- $accountant.callers.text -}}
{{- else -}}
{{- $file := dict "schema" 1 -}}
{{- with $accountant.callers.text -}}
{{- $file = fromYaml . -}}
{{- if hasKey $file "Error" -}}
{{- fail (printf "accountant.callers.text: %s" $file.Error) -}}
{{- end -}}
{{- end -}}
{{- $audience := .Values.agent.token.audience -}}
{{- $kubernetes := merge (default dict $file.kubernetes) (dict "audience" $audience) -}}
{{- $grants := default list $file.grants -}}
{{- $ours := false -}}
{{- range $component, $scopes := dict "agent" (list) "fairshare" (list "read" "policy") "backup" (list "admin") "report" (list "read") -}}
{{- if include "gputally.projected" (list $ $component) -}}
{{- $ours = true -}}
{{- $namespace := include "gputally.namespace" (list $ $component) -}}
{{- $account := include "gputally.serviceAccountName" (list $ $component) -}}
{{- if eq $component "agent" -}}
{{- $_ := set $kubernetes "agents" (append (default list $kubernetes.agents) (printf "%s/%s" $namespace $account) | uniq) -}}
{{- else -}}
{{- $user := printf "system:serviceaccount:%s:%s" $namespace $account -}}
{{- $grants = append $grants (dict "users" (list $user) "scopes" $scopes) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $ours (ne $kubernetes.audience $audience) -}}
{{- fail (printf "accountant.callers.text: kubernetes.audience is %q, and agent.token.audience %q: make them equal" $kubernetes.audience $audience) -}}
{{- end -}}
{{- $_ := set $file "kubernetes" $kubernetes -}}
{{- if $grants -}}
{{- $_ := set $file "grants" $grants -}}
{{- end -}}
{{- toYaml $file -}}
{{- end -}}
{{- end -}}

{{/* Secret with the bearer token with which Prometheus reads the metrics of the accountant and of the fleet's pages; "" if
there is none. */}}
{{- define "gputally.metricsSecret" -}}
{{- if and .Values.monitoring.enabled (or .Values.accountant.enabled .Values.fleet.enabled) -}}
{{- default (include "gputally.component" (list . "metrics-token")) .Values.monitoring.token.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* Base URL of the accountant for agents, controller and jobs: that of the values, else of the chart's Service. */}}
{{- define "gputally.accountantUrl" -}}
{{- if .Values.accountant.enabled -}}
{{- $scheme := include "gputally.tlsMode" . | empty | ternary "http" "https" -}}
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

{{/* "yes" if the controller's pages are at the accountant's address, because they have no address of their own. */}}
{{- define "gputally.oneAddress" -}}
{{- $pages := .Values.fairshare.pages -}}
{{- $own := or $pages.publicUrl $pages.ingress.enabled $pages.httpRoute.enabled -}}
{{- if and .Values.accountant.enabled .Values.accountant.publicUrl .Values.fairshare.enabled $pages.enabled (not $own) -}}
yes
{{- end -}}
{{- end -}}

{{/* Scheme and host of a URL, without a path. */}}
{{- define "gputally.site" -}}
{{- $url := urlParse . -}}
{{- printf "%s://%s" $url.scheme $url.host -}}
{{- end -}}

{{/* Name of the ConfigMap with the issuers for the controller's pages: their own, else the accountant's; "" without sign-in.
Fails for values of an address of their own if they have none: at the accountant's address its sign-in counts. */}}
{{- define "gputally.pagesCallers" -}}
{{- $pages := .Values.fairshare.pages -}}
{{- $accountants := .Values.accountant.callers -}}
{{- $one := include "gputally.oneAddress" . -}}
{{- if and .Values.fairshare.enabled $pages.enabled (not $pages.publicUrl) }}
{{- $sessionKey := $pages.signIn.sessionKey.existingSecret -}}
{{- range $place, $value := dict "callers.text" $pages.callers.text "callers.existingConfigMap" $pages.callers.existingConfigMap "signIn.session" $pages.signIn.session "signIn.existingSecret" $pages.signIn.existingSecret "signIn.sessionKey.existingSecret" $sessionKey "accountantUrl" (ternary $pages.accountantUrl "" (eq $one "yes")) }}
{{- if $value }}
{{- fail (printf "fairshare.pages.%s: belongs to an address of the pages' own: set fairshare.pages.publicUrl, or leave this empty; at the accountant's address people sign in with accountant.callers and accountant.signIn" $place) }}
{{- end }}
{{- end }}
{{- end }}
{{- $one = and $one (or $accountants.text $accountants.existingConfigMap) -}}
{{- if and $one (not .Values.accountant.signIn.sessionKey.existingSecret) }}
{{- fail "fairshare.pages: at the accountant's address they need accountant.signIn.sessionKey.existingSecret, the key with which both read a sign-in; or set fairshare.pages.publicUrl to an address of their own" }}
{{- end }}
{{- if or $one (and .Values.fairshare.enabled $pages.enabled $pages.publicUrl) -}}
{{- $own := or $pages.callers.text $pages.callers.existingConfigMap -}}
{{- if not (or $own (and .Values.accountant.enabled $accountants.text) $accountants.existingConfigMap) }}
{{- fail "fairshare.pages.publicUrl: people sign in with the issuers of a callers file: set fairshare.pages.callers or accountant.callers" }}
{{- end }}
{{- if not (or $one $pages.signIn.sessionKey.existingSecret) }}
{{- fail "fairshare.pages.publicUrl: needs fairshare.pages.signIn.sessionKey.existingSecret, the key that all replicas sign sessions with" }}
{{- end }}
{{- if $own -}}
{{- include "gputally.fileConfigMap" (list . "fairshare" "callers" $pages.callers) -}}
{{- else -}}
{{- include "gputally.fileConfigMap" (list . "accountant" "callers" $accountants) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Volume mount with the authorities of the accountant's certificate, for a client of the accountant. */}}
{{- define "gputally.authorityMount" -}}
{{- if include "gputally.authority" . }}
- name: authority
  mountPath: /etc/gputally/authority
  readOnly: true
{{- end }}
{{- end -}}

{{/* Volume with the authorities of the accountant's certificate. */}}
{{- define "gputally.authorityVolume" -}}
{{- with include "gputally.authority" . }}
- name: authority
  configMap:
    name: {{ . }}
    items:
      - key: {{ include "gputally.authorityKey" $ }}
        path: ca.crt
{{- end }}
{{- end -}}

{{/* Placement and identity that all pods share: (list . .Values.agent). */}}
{{- define "gputally.podPlacement" -}}
{{- $root := first . -}}
{{- $values := last . -}}
{{- with concat (default list (default dict $root.Values.global).imagePullSecrets) $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
{{- if not (hasPrefix "system-" .) }}{{/* Every cluster has these. */}}
{{- $_ := include "gputally.existing" (list $root "scheduling.k8s.io/v1" "PriorityClass" . "priorityClassName") }}
{{- end }}
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
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with $values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Affinity that prefers different nodes for replicas: (list . "fairshare" .Values.fairshare). */}}
{{- define "gputally.apart" -}}
{{- $values := last . -}}
{{- if and (not $values.affinity) (gt (int $values.replicas) 1) -}}
# Prefer different nodes, so that the failure of one node leaves a replica.
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "gputally.selectorLabels" (initial .) | nindent 14 }}
{{- end -}}
{{- end -}}

{{/* A security context with the fields of the values over the chart's: (list TEXT FIELDS). null removes a field. */}}
{{- define "gputally.securityContext" -}}
{{- $context := first . | fromYaml -}}
{{- range $field, $value := last . -}}
{{- if kindIs "invalid" $value -}}
{{- $context = omit $context $field -}}
{{- else -}}
{{- $_ := set $context $field $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* The name of an object of others from the values: (list . APIVERSION KIND NAME PATH), and its namespace if it has one. It
fails before anything is installed if Helm can ask the cluster and the object is not there. Helm itself says that a kind is not there. */}}
{{- define "gputally.existing" -}}
{{- $root := index . 0 -}}
{{- $version := index . 1 -}}
{{- $kind := index . 2 -}}
{{- $name := index . 3 -}}
{{- $namespace := gt (len .) 5 | ternary (last .) "" -}}
{{- if and $name $root.Values.lookups (lookup "v1" "Namespace" "" "kube-system") ($root.Capabilities.APIVersions.Has (printf "%s/%s" $version $kind)) (not (lookup $version $kind $namespace $name)) -}}
{{- fail (printf "%s: %s has no %s %q, and what needs it would wait for it: create it, name another one, or set lookups=false to install nevertheless" (index . 4) (empty $namespace | ternary "the cluster" (printf "the namespace %s" $namespace)) $kind $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The name of a StorageClass from the values: (list . NAME). Volumes made by hand need no object of their class. */}}
{{- define "gputally.storageClass" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $volumes := list -}}
{{- if $root.Values.lookups -}}
{{- range (lookup "v1" "PersistentVolume" "" "").items -}}
{{- $volumes = append $volumes .spec.storageClassName -}}
{{- end -}}
{{- end -}}
{{- if has $name $volumes -}}
{{- $name -}}
{{- else -}}
{{- include "gputally.existing" (list $root "storage.k8s.io/v1" "StorageClass" $name "storageClassName") -}}
{{- end -}}
{{- end -}}

{{/* RuntimeClass of agents and of the test pod: (list . .Values.agent), or a pool's values. `auto` is `nvidia` if the cluster has it;
without a cluster there is none. */}}
{{- define "gputally.runtimeClass" -}}
{{- $root := first . -}}
{{- $values := last . -}}
{{- if ne $values.runtimeClassName "auto" -}}
{{- include "gputally.existing" (list $root "node.k8s.io/v1" "RuntimeClass" $values.runtimeClassName "agent.runtimeClassName") -}}
{{- else if and $root.Values.lookups (not (or $values.simulated.text $values.driverHostPath)) -}}
{{- with lookup "node.k8s.io/v1" "RuntimeClass" "" "nvidia" -}}
{{- .metadata.name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Affinity of agents whose values select no nodes: nodes with one of the usual labels of NVIDIA GPUs. */}}
{{- define "gputally.gpuNodes" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- range list
        (dict "key" "nvidia.com/gpu.present" "operator" "In" "values" (list "true"))
        (dict "key" "feature.node.kubernetes.io/pci-10de.present" "operator" "In" "values" (list "true"))
        (dict "key" "cloud.google.com/gke-gpu-driver-version" "operator" "Exists")
        (dict "key" "karpenter.k8s.aws/instance-gpu-manufacturer" "operator" "In" "values" (list "nvidia"))
        (dict "key" "k8s.amazonaws.com/accelerator" "operator" "Exists")
        (dict "key" "kubernetes.azure.com/accelerator" "operator" "In" "values" (list "nvidia")) }}
      - matchExpressions:
          - {{ toJson . }}
      {{- end }}
{{- end -}}

{{/* Peer of a NetworkPolicy: Prometheus. It is the selector of the values, else the namespaces that run a Prometheus, else
`monitoring`. */}}
{{- define "gputally.monitoringNamespaces" -}}
namespaceSelector:
{{- with .Values.monitoring.namespaceSelector }}
  {{- toYaml . | nindent 2 }}
{{- else }}
{{- $found := list -}}
{{- if and .Values.lookups (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1/Prometheus") -}}
{{- range (lookup "monitoring.coreos.com/v1" "Prometheus" "" "").items -}}
{{- $found = append $found .metadata.namespace -}}
{{- end -}}
{{- end }}
  matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: In, values: {{ default (list "monitoring") $found | uniq | sortAlpha | toJson }}}
{{- end }}
{{- end -}}

{{/* Pod security context that passes the Pod Security Standard "restricted", with the fields of the values: (list .
.Values.accountant). OpenShift gives every namespace ids of its own and refuses others. */}}
{{- define "gputally.restrictedPod" -}}
{{- include "gputally.securityContext" (list (include "gputally.restrictedPodDefaults" (first .)) (last .).podSecurityContext) -}}
{{- end -}}

{{- define "gputally.restrictedPodDefaults" -}}
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

{{/* Container security context that passes the Pod Security Standard "restricted", with the fields of the values:
.Values.accountant */}}
{{- define "gputally.restrictedContainer" -}}
{{- $ours := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "runAsNonRoot" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- include "gputally.securityContext" (list (toYaml $ours) .securityContext) -}}
{{- end -}}

{{/* Peers of a NetworkPolicy: pods of a component, in its namespace: (list . "agent" "fairshare"), where the last is
the component that the policy is for. */}}
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
# Name resolution.
- to:
    {{- toYaml .Values.networkPolicy.dns.to | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Egress to address ranges of the values' networkPolicy, with their name and purpose; empty without ranges. */}}
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

{{/* Egress to an accountant outside the release: the port of its URL, and the URL's address or the ranges of the values. */}}
{{- define "gputally.egressToAccountantElsewhere" -}}
{{- $url := urlParse (include "gputally.accountantUrl" .) -}}
{{- $host := regexReplaceAll ":[0-9]+$" $url.host "" -}}
{{- $cidrs := .Values.networkPolicy.accountantCidrs -}}
{{- if and (not $cidrs) (regexMatch "^[0-9]+(\\.[0-9]+){3}$" $host) -}}
{{- $cidrs = list (printf "%s/32" $host) -}}
{{- end -}}
{{- if not $cidrs -}}
{{- fail "networkPolicy.accountantCidrs: the address ranges of accountant.externalUrl are needed, for agents and controller may ask nothing else" -}}
{{- end -}}
- to:
    {{- range $cidrs }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  ports:
    - port: {{ regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (eq $url.scheme "https" | ternary "443" "80") | int }}
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

{{/* Name of a claim: an existing one, else the chart's: (list . "reports" .Values.reports.persistence). */}}
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
  namespace: {{ (include "gputally.releaseNamespace" (index . 0)) }}
  labels:
    {{- include "gputally.labels" (list (index . 0) (index . 1)) | nindent 4 }}
  annotations:
    # The volume has the books, so Helm keeps it when the release is uninstalled.
    helm.sh/resource-policy: keep
    {{- with $values.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  accessModes: [{{ default "ReadWriteOnce" $values.accessMode }}]
  {{- with $values.storageClassName }}
  storageClassName: {{ include "gputally.storageClass" (list (index $ 0) .) }}
  {{- end }}
  resources:
    requests:
      storage: {{ $values.size }}
{{- end }}
{{- end -}}

{{/* Annotations of an object that exists only while a hook runs; the argument is the weight of the hook. */}}
{{- define "gputally.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* A mapping as environment variables for the programs' settings. */}}
{{- define "gputally.properties" -}}
{{ range $at, $name := keys . | sortAlpha }}{{ if $at }},{{ end }}{{ $name }}={{ get $ $name }}{{ end }}
{{- end -}}

{{/* Environment variables with the address of the lake, for a program that opens it: .Values.accountant.lake. */}}
{{- define "gputally.lakeEnvironment" -}}
- name: GPUTALLY_ACCOUNTANT_LAKE__WAREHOUSE
  value: {{ .warehouse | quote }}
- name: GPUTALLY_ACCOUNTANT_LAKE__CATALOG__TYPE
  value: {{ .catalog.type | quote }}
- name: GPUTALLY_ACCOUNTANT_LAKE__CATALOG__URI
  value: {{ .catalog.uri | quote }}
- name: GPUTALLY_ACCOUNTANT_LAKE__CATALOG__NAME
  value: {{ .catalog.name | quote }}
{{- with .catalog.properties }}
- name: GPUTALLY_ACCOUNTANT_LAKE__CATALOG__PROPERTIES
  value: {{ include "gputally.properties" . }}
{{- end }}
{{- if .existingSecret }}
- name: GPUTALLY_ACCOUNTANT_LAKE__SECRETS
  value: /etc/gputally/lake/lake.yaml
{{- end }}
{{- end -}}
