"""How the page looks: one narrow column in a book face, numerals that align, rules only where they part something."""

from typing import Final

CSS: Final = """\
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --faint: #555; --mark: #0072b2;
  --plot-0: #0072b2; --plot-1: #d55e00; --plot-2: #009e73; --plot-3: #cc79a7; --plot-4: #5b5b5b; --plot-5: #e69f00;
  --plot-6: #56b4e9; --plot-7: #1b1b1b; --plot-8: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e3dd; --faint: #a5a19a; --mark: #6fb7ea;
  --plot-0: #5aaef0; --plot-1: #ff8f4a; --plot-2: #35c99f; --plot-3: #e8a3ca; --plot-4: #b5b5b5; --plot-5: #f2b43c;
  --plot-6: #8fd0f7; --plot-7: #e6e3dd; --plot-8: #3d4146; } }
body { max-width: 47rem; margin: 3.5rem auto 5rem; padding: 0 1.25rem; background: var(--paper); color: var(--ink);
  font: 17px/1.5 Charter, "Bitstream Charter", "Iowan Old Style", "Source Serif 4", Palatino, "Palatino Linotype",
  Georgia, "Liberation Serif", serif; }
h1 { font-size: 1.9rem; font-weight: 600; line-height: 1.15; margin: 0; overflow-wrap: anywhere; }
h1 + p { margin: .3rem 0 1.6rem; font-style: italic; color: var(--faint); }
h2 { font-size: 1.35rem; font-weight: 600; margin: 3.2rem 0 .4rem; padding-top: .7rem;
  border-top: 2px solid var(--ink); }
h3 { font-size: 1.1rem; font-weight: 600; margin: 2.4rem 0 .6rem; overflow-wrap: anywhere; }
a { color: inherit; text-decoration-thickness: 1px; text-underline-offset: .15em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0; font-size: .92rem; }
dt { font-style: italic; color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
nav { margin-top: 1.4rem; font-size: .92rem; }
nav p { margin: .15rem 0; }
.note { margin: 1.1rem 0 0; padding-left: .8rem; border-left: 3px solid var(--ink); font-size: .92rem;
  overflow-wrap: anywhere; }
.verdict { margin: 0 0 1.8rem; padding: .9rem 1.1rem; border: 1px solid var(--mark); border-left-width: 5px;
  font-size: 1.12rem; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20.5rem), 1fr)); gap: 0 1.6rem; }
figure { margin: 1.1rem 0 1.6rem; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
tbody tr[title]:hover { background: color-mix(in srgb, var(--mark) 14%, transparent); }
figcaption, caption { font-size: .86rem; font-style: italic; color: var(--faint); text-align: left; }
figcaption { margin-top: .4rem; }
caption { padding-bottom: .45rem; }
.wide { overflow-x: auto; margin: 1.2rem 0 1.8rem; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; line-height: 1.3;
  font-variant-numeric: lining-nums tabular-nums; border-bottom: 1px solid var(--ink); }
thead tr { border-top: 1px solid var(--ink); border-bottom: 1px solid var(--ink); }
th { font-weight: 400; font-style: italic; vertical-align: bottom; }
th, td { padding: .22rem 0 .22rem .9rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 8.5rem; }
td { vertical-align: baseline; }
.group th { padding-top: .7rem; font-weight: 600; font-style: normal; }
.full td { font-style: italic; border-bottom: 1px dotted #888; }
footer { margin-top: 2.5rem; font-size: .86rem; font-style: italic; color: var(--faint); }
@media (max-width: 30rem) { body { margin-top: 1.5rem; padding: 0 .8rem; font-size: 16px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } table { font-size: .8rem; }
  th, td { padding-left: .55rem; } th:first-child, td:first-child { min-width: 5.5rem; } }
@media print { body { max-width: none; margin: 0; padding: 0; font-size: 10.5pt; }
  figure, tr { break-inside: avoid; } .wide { overflow: visible; } }
"""
