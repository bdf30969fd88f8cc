"""The style of the report's page: light and dark by the reader's setting, no font or file from elsewhere."""

STYLE = """
:root { color-scheme: light dark; --back: #fbfbf9; --card: #ffffff; --text: #1d2327; --soft: #5d6870;
  --line: #dfe3e6; --on: #ffffff; --good: #1a7f4b; --bad: #b42318; --c1: #2563a8; --c2: #0f8a7d;
  --c3: #b8860b; --c4: #8a6bbf; --c5: #3f8f2f; --c6: #a34d8a; --c7: #c8541b; --c8: #8b959c;
  --c9: #b4326e; --c10: #5a5fc0; }
@media (prefers-color-scheme: dark) { :root { --back: #14181b; --card: #1c2226; --text: #e4e8ea;
  --soft: #9aa6ad; --line: #323b41; --on: #0e1214; --good: #58c98b; --bad: #f2857a; --c1: #6aa9e9;
  --c2: #4fc4b6; --c3: #e0b64a; --c4: #b79ce6; --c5: #84cc70; --c6: #da8fc4; --c7: #f08a55; --c8: #7d888f;
  --c9: #ee7fae; --c10: #9ca0f2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 25px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 8px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 14px;
  margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(146px, 1fr)); gap: 12px;
  margin-top: 16px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; margin: 6px 0; }
text { font-size: 12px; fill: var(--text); }
.tick { fill: var(--soft); }
.name { fill: var(--soft); font-weight: 600; }
.on { fill: var(--on); font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
.hull { fill: none; stroke: var(--c1); stroke-width: 1.5; }
.roof { fill: none; stroke: var(--text); stroke-width: 2; }
.mark { fill-opacity: .72; stroke: var(--card); stroke-width: 1; }
.taken { fill-opacity: 1; stroke: var(--text); }
.dot { fill: var(--on); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 20px; margin: 0; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
small { color: var(--soft); font-size: 11px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.thirds { display: flex; flex-wrap: wrap; gap: 8px; }
figure.third { margin: 0; flex: 1 1 290px; max-width: 310px; }
figcaption { font-size: 12px; color: var(--soft); overflow-wrap: anywhere; }
code { font-size: .92em; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 150px; }
td.left, th.left { text-align: left; }
td.wrap { white-space: normal; min-width: 120px; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 560px) { main { padding: 12px 6px 32px; } section { padding: 12px 8px; }
  th, td { padding: 4px 5px; font-size: 12px; } th { white-space: normal; }
  th:first-child, td:first-child { min-width: 96px; } }
.good { color: var(--good); }
.bad { color: var(--bad); }
""" + "".join(f".c{i} {{ fill: var(--c{i}); }} i.c{i} {{ background: var(--c{i}); }}\n" for i in range(1, 11))
