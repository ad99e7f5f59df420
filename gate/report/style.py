"""The look of the HTML page: the reader's light or dark, and paper."""

CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --pass: #0a6b4a; --fail: #b3400a;
  --error: #8a2d86; --waived: #7a5a00; }
@media (prefers-color-scheme: dark) { :root { --pass: #4fc79d; --fail: #ff8a4d; --error: #e08bdc;
  --waived: #e3b94d; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.lead { font-size: 1.1rem; }
dt { font-weight: 600; margin-top: .6rem; overflow-wrap: anywhere; }
dd { margin: 0 0 0 1rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; vertical-align: top; }
th[scope=rowgroup] { background: var(--soft); padding-top: .4rem; }
thead th { white-space: nowrap; }
.facts th { width: 8rem; font-weight: 600; }
.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.PASS { color: var(--pass); } .FAIL { color: var(--fail); } .ERROR { color: var(--error); }
.WAIVED { color: var(--waived); }
span.FAIL, span.ERROR { font-weight: 700; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
figcaption { font-size: .9rem; opacity: .8; }
@media print { main { max-width: none; padding: 0; } figure, tr, dt { break-inside: avoid; }
  thead { display: table-header-group; } h2 { break-after: avoid; } }
"""
