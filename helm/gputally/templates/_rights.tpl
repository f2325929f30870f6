{{/* Rights of the programs. Written by `make reference` from the manifests of plug-ins and accountant/inventory. */}}
{{- define "gputally.rights.agent" -}}
# kubelet: labels, owners and queues of the pods of its node
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# kubelet: the GPU of a device in a ResourceClaim
- apiGroups: [resource.k8s.io]
  resources: [resourceslices]
  verbs: [list, watch]
# kubelet: whether a claim only monitors its devices
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [get]
# kubelet: labels of its node that tell it to close the driver
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}
{{- define "gputally.rights.accountant" -}}
# accountant: to know pods, teams and nodes
- apiGroups: [""]
  resources: [pods, namespaces, nodes]
  verbs: [list, watch]
# accountant: to name the job of a pod
- apiGroups: [batch]
  resources: [jobs, cronjobs]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [apps]
  resources: [replicasets, deployments, statefulsets, daemonsets]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [kubeflow.org]
  resources: [tfjobs, pytorchjobs, mpijobs, xgboostjobs, paddlejobs, jaxjobs, trainjobs, notebooks]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [trainer.kubeflow.org]
  resources: [tfjobs, pytorchjobs, mpijobs, xgboostjobs, paddlejobs, jaxjobs, trainjobs, notebooks]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [ray.io]
  resources: [rayclusters, rayjobs, rayservices]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [argoproj.io]
  resources: [workflows, cronworkflows]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [tekton.dev]
  resources: [taskruns, pipelineruns]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [serving.kserve.io]
  resources: [inferenceservices]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [serving.knative.dev]
  resources: [revisions, configurations, services]
  verbs: [get, list]
# accountant: to name the job of a pod
- apiGroups: [sparkoperator.k8s.io]
  resources: [sparkapplications, scheduledsparkapplications]
  verbs: [get, list]
# accountant: to know callers by their tokens
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
# accountant: to know what callers may do
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
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
# volcano: to name the job of a pod
- apiGroups: [batch.volcano.sh]
  resources: [jobs]
  verbs: [get, list]
{{- end }}
{{- define "gputally.rights.fairshare" -}}
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
{{- define "gputally.schedulerNotes" -}}, {{ include "gputally.component" . }}-runai{{- end }}
