import {
  createTheme, dateTime, FieldType, getDisplayProcessor, getDisplayValueAlignmentFactors, ThemeContext, toDataFrame,
} from '@grafana/data';
import type { DataFrame, Field, FieldConfig, TimeRange } from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, PanelContextProvider, Table, TimeSeries } from '@grafana/ui';
import type { BarGaugeDisplayMode, BigValueColorMode, BigValueGraphMode, BigValueTextMode, PanelContext } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

/* Grafana's own components over what Grafana's own data source would have answered. `window.board` is written by the
   program that takes the pictures: the dashboard's JSON and, by panel and query, the answers of a Prometheus. */
interface Series { metric: Record<string, string>; values: Array<[number, string]> }
interface Answer { refId: string; legend: string; series: Series[] }
interface Override { matcher: { id: string; options: string }; properties: Array<{ id: string; value: unknown }> }
interface Panel {
  id: number; type: string; title: string; description: string;
  gridPos: { x: number; y: number; w: number; h: number };
  options: any; fieldConfig: { defaults: FieldConfig; overrides: Override[] };
  transformations?: any[];
}
declare global {
  interface Window { board: { dashboard: { title: string; panels: Panel[] }; answers: Record<string, Answer[]>; from: number; to: number; width: number } }
}

const theme = createTheme({ colors: { mode: 'light' } });
const CELL = 30, GAP = 8;
const { dashboard, answers, from, to, width } = window.board;
const range: TimeRange = { from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } };

const named = (legend: string, metric: Record<string, string>) =>
  legend.replace(/{{\s*(\w+)\s*}}/g, (_, label) => metric[label] ?? '');

function matches(override: Override, name: string): boolean {
  if (override.matcher.id === 'byName') { return override.matcher.options === name; }
  return new RegExp(override.matcher.options.replace(/^\/|\/$/g, '')).test(name);
}

/* What Grafana's field overrides do, for the two matchers that our dashboards use. */
function configured(panel: Panel, name: string): FieldConfig {
  const config: any = structuredClone(panel.fieldConfig.defaults);
  config.displayName = name;
  config.custom = config.custom ?? {};
  for (const override of panel.fieldConfig.overrides.filter((each) => matches(each, name))) {
    for (const { id, value } of override.properties) {
      if (id.startsWith('custom.')) { config.custom[id.slice(7)] = value; } else { config[id] = value; }
    }
  }
  delete config.links;
  return config;
}

function finished(frame: DataFrame): DataFrame {
  for (const field of frame.fields) { field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' }); }
  return frame;
}

function frames(panel: Panel): DataFrame[] {
  return (answers[panel.id] ?? []).flatMap((answer) =>
    answer.series.map((series) => {
      const name = answer.legend === '__auto' ? panel.title : named(answer.legend, series.metric);
      const values = series.values.map(([, value]) => Number(value));
      return finished(toDataFrame({ refId: answer.refId, fields: [
        { name: 'Time', type: FieldType.time, values: series.values.map(([at]) => at * 1000), config: {} },
        { name, type: FieldType.number, values, config: configured(panel, name), labels: {} },
      ] }));
    }));
}

/* The transformations `merge` and `organize`: one row per set of labels, one column per query. */
function rows(panel: Panel): DataFrame {
  const { indexByName, renameByName } = panel.transformations![1].options;
  const order = Object.keys(indexByName).sort((a, b) => indexByName[a] - indexByName[b]);
  const merged = new Map<string, Record<string, string | number | null>>();
  for (const answer of answers[panel.id] ?? []) {
    for (const { metric, values } of answer.series) {
      const key = JSON.stringify(order.filter((name) => !name.startsWith('Value #')).map((name) => metric[name] ?? ''));
      const row = merged.get(key) ?? { ...metric };
      row[`Value #${answer.refId}`] = Number(values[values.length - 1][1]);
      merged.set(key, row);
    }
  }
  const [{ displayName, desc }] = panel.options.sortBy;
  const by = Object.keys(renameByName).find((name) => renameByName[name] === displayName)!;
  const sorted = [...merged.values()].sort((a, b) => (Number(a[by] ?? -1) < Number(b[by] ?? -1) ? 1 : -1) * (desc ? 1 : -1));
  return finished(toDataFrame({ fields: order.map((name) => ({
    name: renameByName[name],
    type: name.startsWith('Value #') ? FieldType.number : FieldType.string,
    values: sorted.map((row) => row[name] ?? null),
    config: configured(panel, renameByName[name]),
  })) }));
}

function Body({ panel, w, h }: { panel: Panel; w: number; h: number }) {
  if (panel.type === 'table') {
    return <Table data={rows(panel)} width={w} height={h} columnMinWidth={50} />;
  }
  const data = frames(panel);
  if (!data.length) { return <div style={{ padding: 12 }}>no data</div>; }
  if (panel.type === 'timeseries') {
    return <TimeSeries frames={data} width={w} height={h} timeRange={range} timeZone="utc" legend={panel.options.legend} options={panel.options} />;
  }
  const last = (field: Field) => field.display!(field.values[field.values.length - 1]);
  if (panel.type === 'bargauge') {
    const each = Math.min(32, h / data.length);
    const shown = [...data].sort((a, b) => b.fields[1].values.at(-1) - a.fields[1].values.at(-1));
    const most = Math.max(...shown.map((frame) => frame.fields[1].values.at(-1)));
    const values = shown.map((frame) => ({ ...last(frame.fields[1]), title: frame.fields[1].name }));
    const factors = getDisplayValueAlignmentFactors(values.map((display) => ({ display }) as any));
    return <div>{shown.map((frame, i) => {
      const field = { ...frame.fields[1], config: { min: 0, max: most, ...frame.fields[1].config } };
      const value = { ...getDisplayProcessor({ field, theme })(field.values.at(-1)), title: field.name };
      return <BarGauge key={i} theme={theme} width={w} height={each} field={field.config} value={value} orientation={'horizontal' as any}
        displayMode={panel.options.displayMode as BarGaugeDisplayMode} showUnfilled itemSpacing={4} namePlacement={'left' as any}
        alignmentFactors={factors} text={{ valueSize: 14, titleSize: 12 }} />;
    })}</div>;
  }
  return <div style={{ display: 'flex' }}>{data.map((frame, i) => (
    <BigValue key={i} theme={theme} width={w / data.length} height={h} value={last(frame.fields[1])}
      sparkline={panel.options.graphMode === 'area' ? { y: frame.fields[1], x: frame.fields[0] } : undefined}
      colorMode={panel.options.colorMode as BigValueColorMode} graphMode={panel.options.graphMode as BigValueGraphMode}
      textMode={'value' as BigValueTextMode} />))}</div>;
}

const context = { eventBus: { publish() {}, subscribe: () => ({ unsubscribe() {} }), getStream: () => ({ subscribe: () => ({ unsubscribe() {} }), pipe: () => ({ subscribe: () => ({ unsubscribe() {} }) }) }) }, app: 'dashboard' } as unknown as PanelContext;

function Dashboard() {
  const column = (width - GAP) / 24;
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PanelContextProvider value={context}>
        <div style={{ position: 'relative', width, background: theme.colors.background.canvas, minHeight: 100 }}>
          <h3 style={{ padding: '8px 16px', margin: 0, height: 40 }}>{dashboard.title}</h3>
          <div style={{ position: 'relative', height: Math.max(...dashboard.panels.map((p) => p.gridPos.y + p.gridPos.h)) * (CELL + GAP) + 16 }}>
            {dashboard.panels.map((panel) => {
              const { x, y, w, h } = panel.gridPos;
              const box = { left: GAP + x * column, top: y * (CELL + GAP), width: w * column - GAP, height: h * (CELL + GAP) - GAP };
              return (
                <div key={panel.id} data-panel={panel.type} data-title={panel.title} style={{ position: 'absolute', ...box }}>
                  {panel.type === 'row' ? <h5 style={{ margin: '8px 4px' }}>{panel.title}</h5> : (
                    <PanelChrome title={panel.title} description={panel.description} width={box.width} height={box.height}>
                      {(inner, high) => <Body panel={panel} w={inner} h={high} />}
                    </PanelChrome>)}
                </div>);
            })}
          </div>
        </div>
      </PanelContextProvider>
    </ThemeContext.Provider>);
}

createRoot(document.getElementById('root')!).render(<Dashboard />);
