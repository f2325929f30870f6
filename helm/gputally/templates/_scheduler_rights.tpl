{{/* Rights for the objects of schedulers. Written by `make reference` from the manifests in fairshare/schedulers. */}}
{{- define "gputally.schedulerRights.accountant" -}}
# kai: to bill a pod to its queue
- apiGroups: [scheduling.run.ai]
  resources: [podgroups]
  verbs: [get, list, watch]
# kueue: to bill a pod to its queue
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues, clusterqueues, cohorts]
  verbs: [list, watch]
# kueue: to bill a pod to its queue
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch]
# volcano: to bill a pod to its queue
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch]
{{- end }}
{{- define "gputally.schedulerRights.fairshare" -}}
# kai: to read demand and write weights
- apiGroups: [scheduling.run.ai]
  resources: [queues]
  verbs: [list, patch]
# kai: to read gangs
- apiGroups: [scheduling.run.ai]
  resources: [podgroups]
  verbs: [list]
# kai: to see whether weights act
- apiGroups: [kai.scheduler]
  resources: [schedulingshards]
  verbs: [list]
# kai: to see what a node pool is
- apiGroups: [kai.scheduler]
  resources: [configs]
  resourceNames: [kai-config]
  verbs: [get]
# kueue: to read demand and write weights
- apiGroups: [kueue.x-k8s.io]
  resources: [clusterqueues, cohorts, localqueues]
  verbs: [list, patch]
# kueue: to see the nodes of a quota
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors]
  verbs: [list]
# kueue: to read gangs
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list]
{{- if .Values.fairshare.rbac.preempt }}
# kueue: to stop Workloads
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [patch]
{{- end }}
# volcano: to read demand and write weights
- apiGroups: [scheduling.volcano.sh]
  resources: [queues]
  verbs: [list, patch]
# volcano: to read gangs
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [list]
# volcano: to read gangs
- apiGroups: [batch.volcano.sh]
  resources: [jobs]
  verbs: [get, list]
{{- if .Values.fairshare.rbac.preempt }}
# volcano: to stop Jobs
- apiGroups: [batch.volcano.sh]
  resources: [jobs]
  verbs: [patch]
# volcano: to stop Jobs
- apiGroups: [bus.volcano.sh]
  resources: [commands]
  verbs: [create, list]
{{- end }}
{{- end }}
