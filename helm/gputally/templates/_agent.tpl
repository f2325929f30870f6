{{/* One DaemonSet: (list . NAME VALUES). NAME is the name of a node pool, empty if there are no pools. */}}
{{- define "gputally.agentDaemonSet" -}}
{{- $root := index . 0 }}
{{- $pool := index . 1 }}
{{- $values := index . 2 }}
{{- $me := list $root "agent" }}
{{- $name := include "gputally.agentPool" (list $root $pool) }}
{{- $level := $values.privilege }}
{{- $names := ne $level "allocation" }}
{{- $simulated := $values.simulated.text }}
{{- if and $values.accountingMode (not $names) }}
{{- fail "agent.accountingMode: needs agent.privilege process or profiling: its figures are per process" }}
{{- end }}
{{- if and (ne (int64 $values.runAsUser) 0) (or (eq $level "profiling") $values.accountingMode) }}
{{- fail "agent.runAsUser: agent.privilege profiling and agent.accountingMode need CAP_SYS_ADMIN, and the container runtime gives a capability to root alone" }}
{{- end }}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ $name }}
  namespace: {{ include "gputally.agentNamespace" $root }}
  labels:
    {{- include "gputally.labels" $me | nindent 4 }}
    {{- include "gputally.poolLabel" $pool | nindent 4 }}
spec:
  selector:
    matchLabels:
      {{- include "gputally.selectorLabels" $me | nindent 6 }}
      {{- include "gputally.poolLabel" $pool | nindent 6 }}
  updateStrategy:
    type: {{ $values.updateStrategy.type }}
    {{- if eq $values.updateStrategy.type "RollingUpdate" }}
    rollingUpdate:
      maxUnavailable: {{ $values.updateStrategy.maxUnavailable }}
    {{- end }}
  template:
    metadata:
      labels:
        {{- include "gputally.podLabels" (append $me $values) | nindent 8 }}
        {{- include "gputally.poolLabel" $pool | nindent 8 }}
      annotations:
        kubectl.kubernetes.io/default-container: agent
        {{- with $simulated }}
        checksum/simulated: {{ . | sha256sum }}
        {{- end }}
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "gputally.serviceAccountName" $me }}
      automountServiceAccountToken: false
      # Kubernetes would set variables for each Service, which the program would read as its settings.
      enableServiceLinks: false
      {{- with include "gputally.runtimeClass" (list $root $values) }}
      runtimeClassName: {{ . }}
      {{- end }}
      hostPID: {{ $names }}
      terminationGracePeriodSeconds: {{ add $values.graceSeconds 15 }}
      {{- include "gputally.podPlacement" (list $root $values) | nindent 6 }}
      {{- if not (or $values.nodeSelector $values.affinity) }}
      affinity:
        {{- include "gputally.gpuNodes" . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "gputally.securityContext" (list "seccompProfile: {type: RuntimeDefault}" $values.podSecurityContext) | nindent 8 }}
      containers:
        - name: agent
          image: {{ include "gputally.image" (list $root $values.image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - agent
            - run
            - --privilege={{ $level }}
            {{- if $simulated }}
            - --simulated=/etc/gputally/simulated/scenario.yaml
            {{- else }}
            - --kubelet-socket=/var/lib/kubelet/pod-resources/kubelet.sock
            {{- end }}
            - --pod-labels={{ join "," $values.exportPodLabels }}
            - --gpu-sharing={{ join "," $values.gpuSharing }}
            {{- if not $values.kubernetesApi }}
            - --api-url=off
            {{- end }}
            {{- if $values.accountingMode }}
            - --accounting
            {{- end }}
            - --cluster={{ $root.Values.clusterName }}
            - --url={{ include "gputally.accountantUrl" $root }}
            - --token-file=/etc/gputally/token/token
            {{- if include "gputally.authority" $root }}
            - --ca-file=/etc/gputally/authority/ca.crt
            {{- end }}
            - --spool=/var/lib/gputally
            - --spool-max-mib={{ int64 $values.spool.maxMebibytes }}
            - --spool-max-days={{ $values.spool.maxDays }}
            - --interval={{ $values.intervalSeconds }}
            - --sample={{ $values.sampleSeconds }}
            - --ship={{ $values.shipSeconds }}
            - --grace={{ $values.graceSeconds }}
            - --month-zone={{ $root.Values.timezone }}
            - --port={{ int64 $values.port }}
            {{- with $root.Values.hosts }}
            - --hosts={{ join "," . }}
            {{- end }}
            {{- with $values.releaseFile }}
            # The file is in the spool's folder on the node, where the tool that reconfigures MIG creates it.
            - --release-file=/var/lib/gputally/{{ . }}
            {{- end }}
            {{- if $names }}
            - --pod-logs=/var/log/pods
            {{- end }}
            {{- with $values.extraArgs }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          env:
            - name: NODE_NAME
              valueFrom:
                fieldRef:
                  fieldPath: spec.nodeName
            - name: NVIDIA_VISIBLE_DEVICES
              value: all
            - name: NVIDIA_DRIVER_CAPABILITIES
              value: utility
            {{- if eq $level "profiling" }}
            - name: NVIDIA_MIG_MONITOR_DEVICES
              value: all
            {{- end }}
            {{- if $values.driverHostPath }}
            - name: LD_LIBRARY_PATH
              value: /usr/local/nvidia/lib64
            {{- end }}
            {{- with $values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: metrics
              containerPort: {{ int64 $values.port }}
          startupProbe:
            httpGet: {path: /livez, port: metrics}
            periodSeconds: 2
            failureThreshold: 30
          livenessProbe:
            httpGet: {path: /livez, port: metrics}
            periodSeconds: 20
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /readyz, port: metrics}
            periodSeconds: 10
            timeoutSeconds: 5
          resources:
            {{- toYaml $values.resources | nindent 12 }}
          securityContext:
            {{- include "gputally.securityContext" (list (include "gputally.agentSecurityContext" $values) $values.securityContext) | nindent 12 }}
          volumeMounts:
            - name: spool
              mountPath: /var/lib/gputally
            {{- if $names }}
            - name: pod-logs
              mountPath: /var/log/pods
              readOnly: true
            {{- end }}
            {{- if $simulated }}
            - name: simulated
              mountPath: /etc/gputally/simulated
              readOnly: true
            {{- else }}
            # Mount the folder, not the socket in it, because a restarted kubelet creates a new socket.
            - name: pod-resources
              mountPath: /var/lib/kubelet/pod-resources
              readOnly: true
            {{- end }}
            {{- if $values.driverHostPath }}
            - name: driver
              mountPath: /usr/local/nvidia
              readOnly: true
            {{- end }}
            {{- include "gputally.authorityMount" $root | nindent 12 }}
            {{- if $values.kubernetesApi }}
            - name: kube-api-access
              mountPath: /var/run/secrets/kubernetes.io/serviceaccount
              readOnly: true
            {{- end }}
            - name: token
              mountPath: /etc/gputally/token
              readOnly: true
            {{- with $values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: spool
          hostPath:
            path: {{ include "gputally.spoolFolder" (list $root $values) }}
            type: DirectoryOrCreate
        {{- if $names }}
        - name: pod-logs
          hostPath:
            path: {{ $values.podLogsHostPath }}
            type: Directory
        {{- end }}
        {{- if $simulated }}
        - name: simulated
          configMap:
            name: {{ $name }}-simulated
        {{- else }}
        - name: pod-resources
          hostPath:
            path: {{ $values.podResourcesHostPath }}
            type: Directory
        {{- end }}
        {{- with $values.driverHostPath }}
        - name: driver
          hostPath:
            path: {{ . }}
            type: Directory
        {{- end }}
        {{- include "gputally.authorityVolume" $root | nindent 8 }}
        {{- if $values.kubernetesApi }}
        # The token is for this container alone, and the kubelet renews it, as in the mount that Kubernetes adds itself.
        - name: kube-api-access
          projected:
            defaultMode: 0400
            sources:
              - serviceAccountToken:
                  path: token
                  expirationSeconds: 3607
              - configMap:
                  name: kube-root-ca.crt
                  items:
                    - key: ca.crt
                      path: ca.crt
        {{- end }}
        {{- include "gputally.tokenVolume" (list $root "agent" "0400") | nindent 8 }}
        {{- with $values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}

{{/* Folder of the spool on the node: (list . VALUES). Each release has its own, because two agents cannot share a spool. */}}
{{- define "gputally.spoolFolder" -}}
{{- $root := first . -}}
{{- printf "%s/%s.%s" (trimSuffix "/" (last .).spool.hostPath) (include "gputally.releaseNamespace" $root) (include "gputally.fullname" $root) -}}
{{- end -}}

{{/* Security context of the agent's container, from its values. */}}
{{- define "gputally.agentSecurityContext" -}}
runAsUser: {{ int64 .runAsUser }}
runAsGroup: {{ int64 .runAsGroup }}
runAsNonRoot: {{ ne (int64 .runAsUser) 0 }}
readOnlyRootFilesystem: true
{{- with .seLinuxType }}
seLinuxOptions:
  type: {{ . }}
{{- end }}
privileged: {{ .privileged }}
{{- if not .privileged }}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  {{- if or (eq .privilege "profiling") .accountingMode }}
  add: [SYS_ADMIN]
  {{- end }}
{{- end }}
{{- end -}}

{{/* Name of a DaemonSet: (list . POOL). */}}
{{- define "gputally.agentPool" -}}
{{- include "gputally.component" (list (first .) "agent") -}}
{{- with last . }}-{{ . }}{{ end -}}
{{- end -}}

{{/* The label that distinguishes the pods of a node pool from those of other pools. */}}
{{- define "gputally.poolLabel" -}}
{{- with . -}}
gputally.dev/pool: {{ . }}
{{- end -}}
{{- end -}}

{{/* The agents' DaemonSets as JSON: name of the node pool (empty: there are no pools) -> its values. */}}
{{- define "gputally.agents" -}}
{{- $found := dict -}}
{{- $common := omit .Values.agent "pools" -}}
{{- range $pool, $own := .Values.agent.pools -}}
{{- $_ := set $found $pool (mergeOverwrite (deepCopy $common) $own) -}}
{{- end -}}
{{- toJson (empty $found | ternary (dict "" $common) $found) -}}
{{- end -}}
