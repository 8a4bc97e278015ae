"""How the page looks: one narrow column in a book face, numerals that align, rules only where they part something."""

from typing import Final

CSS: Final = """\
body { max-width: 47rem; margin: 3.5rem auto 5rem; padding: 0 1.25rem; background: #fff; color: #1b1b1b;
  font: 17px/1.5 Charter, "Bitstream Charter", "Iowan Old Style", "Source Serif 4", Palatino, "Palatino Linotype",
  Georgia, "Liberation Serif", serif; }
h1 { font-size: 1.9rem; font-weight: 600; line-height: 1.15; margin: 0; overflow-wrap: anywhere; }
h1 + p { margin: .3rem 0 1.6rem; font-style: italic; color: #555; }
h2 { font-size: 1.35rem; font-weight: 600; margin: 3.2rem 0 .4rem; padding-top: .7rem; border-top: 2px solid #1b1b1b; }
h3 { font-size: 1.1rem; font-weight: 600; margin: 2.4rem 0 .6rem; overflow-wrap: anywhere; }
a { color: inherit; text-decoration-thickness: 1px; text-underline-offset: .15em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0; font-size: .92rem; }
dt { font-style: italic; color: #555; }
dd { margin: 0; overflow-wrap: anywhere; }
nav { margin-top: 1.4rem; font-size: .92rem; }
nav p { margin: .15rem 0; }
.note { margin: 1.1rem 0 0; padding-left: .8rem; border-left: 3px solid #1b1b1b; font-size: .92rem;
  overflow-wrap: anywhere; }
figure { margin: 1.1rem 0 1.6rem; }
img { display: block; width: 100%; height: auto; }
figcaption, caption { font-size: .86rem; font-style: italic; color: #555; text-align: left; }
figcaption { margin-top: .4rem; }
caption { padding-bottom: .45rem; }
.wide { overflow-x: auto; margin: 1.2rem 0 1.8rem; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; line-height: 1.3;
  font-variant-numeric: lining-nums tabular-nums; border-bottom: 1px solid #1b1b1b; }
thead tr { border-top: 1px solid #1b1b1b; border-bottom: 1px solid #1b1b1b; }
th { font-weight: 400; font-style: italic; vertical-align: bottom; }
th, td { padding: .22rem 0 .22rem .9rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 8.5rem; }
td { vertical-align: baseline; }
.group th { padding-top: .7rem; font-weight: 600; font-style: normal; }
.full td { font-style: italic; border-bottom: 1px dotted #888; }
footer { margin-top: 2.5rem; font-size: .86rem; font-style: italic; color: #555; }
@media print { body { max-width: none; margin: 0; padding: 0; font-size: 10.5pt; }
  figure, tr { break-inside: avoid; } .wide { overflow: visible; } }
"""
