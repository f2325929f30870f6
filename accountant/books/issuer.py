"""Who charges whom, as files for finance systems name them: the operator's words, nothing that figures depend on."""

from __future__ import annotations

from pydantic import Field

from accountant.terms import Model


class Issuer(Model):
    """Names in FOCUS exports, the same in every month: who reads them groups by them."""

    name: str = Field(default="GPU platform", min_length=1, max_length=200)
    """Who provides the service and issues the invoices."""
    billing_account: str = Field(default="gpu-cluster", min_length=1, max_length=200)
    """BillingAccountId: the account of the organisation that all teams belong to."""
    billing_account_name: str = Field(default="GPU cluster", min_length=1, max_length=200)
    """Its name."""
    host: str = Field(default="", max_length=200)
    """HostProviderName: the cloud or the data centre that the GPUs stand in; empty: not said."""
