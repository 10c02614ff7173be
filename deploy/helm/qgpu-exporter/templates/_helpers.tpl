{{/* Names, labels and what several templates need; nothing that makes an object. */}}

{{- define "qgpu-exporter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "qgpu-exporter.fullname" -}}
{{- $name := include "qgpu-exporter.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "qgpu-exporter.selectorLabels" -}}
app.kubernetes.io/name: {{ include "qgpu-exporter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "qgpu-exporter.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "qgpu-exporter.selectorLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "qgpu-exporter.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "qgpu-exporter.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "qgpu-exporter.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Whether the pod talks to the API server as its service account. */}}
{{- define "qgpu-exporter.usesToken" -}}
{{- if and .Values.kubernetesApi.enabled (not .Values.kubernetesApi.nodeKubeconfig) -}}true{{- end -}}
{{- end -}}

{{/* A setting by its path, such as (list . "kubernetes" "dra" "auto"); the last is the default. */}}
{{- define "qgpu-exporter.setting" -}}
{{- $group := dig (index . 1) (dict) (index . 0).Values.settings -}}
{{- $value := get $group (index . 2) -}}
{{- if kindIs "invalid" $value -}}{{ index . 3 }}{{- else if eq (toString $value) "" -}}{{ index . 3 }}{{- else -}}{{ $value }}{{- end -}}
{{- end -}}

{{/* Flags from nested settings: one a line, sorted; a list repeats its flag. */}}
{{- define "qgpu-exporter.flags" -}}
{{- $prefix := .prefix -}}
{{- range $key, $value := .settings -}}
{{- if kindIs "map" $value -}}
{{- include "qgpu-exporter.flags" (dict "prefix" (printf "%s%s." $prefix $key) "settings" $value) -}}
{{- else if kindIs "slice" $value -}}
{{- range $value }}
- {{ printf "--%s%s=%v" $prefix $key . | quote }}
{{- end -}}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s%s=%v" $prefix $key $value | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "qgpu-exporter.hasFiles" -}}
{{- if or .Values.dcgmCollectors .Values.xidClasses -}}true{{- end -}}
{{- end -}}

{{- define "qgpu-exporter.hasVolumes" -}}
{{- with .Values -}}
{{- if or .kubelet.enabled .hostProc.enabled .stack.enabled .driver.waitForToolkit (has .driver.access (list "operator" "host" "gke")) .kernelLog.enabled .web.configSecret (include "qgpu-exporter.hasFiles" $) (and .kubernetesApi.enabled .kubernetesApi.nodeKubeconfig) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a ServiceMonitor's and a PodMonitor's endpoint have in common. */}}
{{- define "qgpu-exporter.endpoint" -}}
{{- $monitor := .monitor -}}
port: metrics
path: {{ include "qgpu-exporter.setting" (list .root "web" "telemetry-path" "/metrics") }}
scheme: {{ .root.Values.web.scheme }}
interval: {{ $monitor.interval }}
scrapeTimeout: {{ $monitor.scrapeTimeout }}
# namespace, pod and container of the series name the GPU's user.
honorLabels: true
{{- with $monitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $monitor.authorization }}
authorization:
  {{- toYaml . | nindent 2 }}
{{- end }}
relabelings:
  # The same name across restarts of the pod.
  - action: replace
    sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
  # Cards have this label by themselves; the exporter's own families and `up` get it here.
  - action: replace
    sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
  # Else a card's series, which have no such labels, would get those of the exporter's own pod.
  - action: labeldrop
    regex: pod|container|namespace|service|endpoint
  {{- with $monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "qgpu-exporter.securityContext" -}}
{{- if .privileged }}
privileged: true
{{- else }}
allowPrivilegeEscalation: false
{{- end }}
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .add }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- define "qgpu-exporter.podSecurityContext" -}}
{{- if .Values.runAsRoot }}
runAsUser: 0
runAsGroup: 0
{{- else }}
runAsNonRoot: true
runAsUser: 65534
runAsGroup: 65534
{{- end }}
{{- with .Values.supplementalGroups }}
supplementalGroups: {{ toJson . }}
{{- end }}
{{- with .Values.seLinuxType }}
seLinuxOptions:
  type: {{ . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}
