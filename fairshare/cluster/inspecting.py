"""Questions about the API server itself, for whoever looks for faults: what it serves, who may what, what time it is.

Reads and reviews alone; nothing is stored by any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from fairshare.cluster.api import KubernetesCluster
from fairshare.errors import NotFound, Unavailable

_REVIEWS = "/apis/authorization.k8s.io/v1"


class Inspector(KubernetesCluster):
    """A cluster that is also asked about itself. Every method raises fairshare.errors.ClusterError."""

    def served(self, groups: Iterable[str]) -> dict[tuple[str, str], tuple[str, ...]]:
        """Versions by (group, plural) of these groups, the preferred one first; "" is the core group."""
        known = {group["name"]: group for group in self._send("GET", "/apis").get("groups") or ()}
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for group in dict.fromkeys(groups):
            versions = [each["version"] for each in known.get(group, {}).get("versions") or ()] if group else ["v1"]
            for version in versions:
                path = f"/apis/{group}/{version}" if group else f"/api/{version}"
                for resource in self._resources(path):
                    key = group, resource
                    found[key] = (*found.get(key, ()), version)
        return found

    def _resources(self, path: str) -> list[str]:
        try:
            resources = self._send("GET", path).get("resources") or ()
        except NotFound:  # went away since the groups were told
            return []
        return [str(resource["name"]) for resource in resources if "/" not in resource["name"]]

    def may(self, wanted: Mapping[str, str], user: str = "", groups: Iterable[str] = ()) -> bool:
        """Whether the caller, or that user, may. wanted: resourceAttributes (group, resource, subresource, verb, name,
        namespace). To ask about another user is a right of its own."""
        spec: dict[str, Any] = {"resourceAttributes": dict(wanted)}
        kind = "SelfSubjectAccessReview"
        if user:
            kind, spec = "SubjectAccessReview", {**spec, "user": user, "groups": list(groups)}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        answer = self._send("POST", f"{_REVIEWS}/{kind.lower()}s", {}, body)
        return bool((answer.get("status") or {}).get("allowed"))

    def caller(self) -> str:
        """Who the API server takes us for. Source: SelfSubjectReview, Kubernetes 1.28."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self._send("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {}, body)
        return str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")

    def server_ms(self) -> int:
        """What time the server says it is, in whole seconds: UTC milliseconds."""
        response = self._open("GET", "/version", None, None, "application/json", self._timeout_s)
        text = next((value for name, value in response.response.headers.items() if name.lower() == "date"), "")
        response.response.drain_conn()
        try:
            return round(parsedate_to_datetime(text).timestamp() * 1000)
        except ValueError as error:
            raise Unavailable(f"the API server's answer has no Date: {text!r}") from error
