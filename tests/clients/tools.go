//go:build tools

// Package clients pins helm and actionlint, which are built as they are published.
package clients

import (
	_ "github.com/rhysd/actionlint/cmd/actionlint"
	_ "helm.sh/helm/v4/cmd/helm"
)
