"""Two kinds of import contract of our own, for import-linter.

`PublishedLanguage`: a stage may import of another stage only the modules it publishes, so that a
new private module is protected on the day it is written. `SoleImporter`: an outside package is
imported by the named modules alone.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class _Verdict(Contract):
    """A contract whose faults are single imports: `importer -> imported (line)`."""

    def faults(self, graph: ImportGraph) -> list[tuple[str, str]]:
        raise NotImplementedError

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002 - import-linter's signature
        found = [
            f"{importer} -> {imported} (l.{detail['line_number']})"
            for importer, imported in self.faults(graph)
            for detail in graph.get_import_details(importer=importer, imported=imported)
        ]
        return ContractCheck(kept=not found, metadata={"found": sorted(found)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["found"]:
            output.print_error(line)


class PublishedLanguage(_Verdict):
    """`importer` imports of `stage` nothing but `published` and what lies below it."""

    importer = fields.StringField()
    stage = fields.StringField()
    published = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def faults(self, graph: ImportGraph) -> list[tuple[str, str]]:
        sources = {self.importer} | graph.find_descendants(self.importer)
        published = {found for one in self.published for found in (one, *graph.find_descendants(one))}
        targets = ({self.stage} | graph.find_descendants(self.stage)) - published
        return [(s, t) for s in sources for t in graph.find_modules_directly_imported_by(s) if t in targets]


class SoleImporter(_Verdict):
    """`package` (outside) is imported by `modules` and what lies below them, by no other module."""

    package = fields.StringField()
    modules = fields.ListField(subfield=fields.StringField())

    def faults(self, graph: ImportGraph) -> list[tuple[str, str]]:
        if self.package not in graph.modules:
            return []
        importers = graph.find_modules_that_directly_import(self.package)
        inside = tuple(f"{m}." for m in self.modules)
        return [(i, self.package) for i in importers if i not in self.modules and not i.startswith(inside)]
