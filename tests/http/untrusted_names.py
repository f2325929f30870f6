"""Names that a page, a file, a message or a query would misread if they were more than text."""

from __future__ import annotations

MARK = "zq"
"""Part of every name, by which the tests find it."""
NAMES = tuple(
    f"{MARK}{n}{name}" if name[:1] not in "=+-@" else f"{name}{MARK}{n}"
    for n, name in enumerate(
        (
            "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "</title></style><svg onload=alert(1)>",
            "' onmouseover='alert(1)", "javascript:alert(1)", "{{7*7}}{% raw %}${7*7}", "&lt;b&gt;&amp;#x3c;",
            "=HYPERLINK(\"http://evil.example\",\"x\")", "@SUM(1+9)*cmd|' /C calc'!A0", "+1+1", "-2+3",
            "<!channel> <http://evil.example|click> *b*", "[x](http://evil.example) **b**",
            "line Bcc: all@evil.example", "\u202etxt.exe \u2066x", "../../etc/passwd?a=b&c=d#e%2f",
            "esc [2J \ufeff bare return",
        )
    )
)  # fmt: skip
