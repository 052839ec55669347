"""Test the two storeys of the project: what an experiment edits lies in the root, and what it
stands on in support/, which imports nothing from the root."""

import ast

from processes import ROOT


def imported_by(path):
    """Return the names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f'{node.module}.{alias.name}' for alias in node.names}
    return names


def test_support_imports_nothing_from_the_root():
    root = {path.stem for path in ROOT.glob('*.py')} | {'paper'}
    for path in (ROOT / 'support').glob('*.py'):
        found = {name.split('.')[0] for name in imported_by(path)} & root
        assert not found, path


def test_hacks_edit_files_of_the_root_only():
    for patch in (ROOT / 'tests' / 'hacks').glob('*.patch'):
        files = [x[6:] for x in patch.read_text().splitlines() if x.startswith('+++ b/')]
        assert files and not any('/' in name for name in files), patch
