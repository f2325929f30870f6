//go:build tools

// Package clients pins helm, which is built as it is published.
package clients

import _ "helm.sh/helm/v4/cmd/helm"
