"""Table 3: forecasting, models by series and horizon, beside baselines that need no training."""

from titans_pt.reproduce import pictures
from titans_pt.reproduce.figures import Figure
from titans_pt.reproduce.measures import TRAINING, Find, Measure, steps_trained
from titans_pt.reproduce.study import Column, Row, Study

MODELS = ("lmm", "mac", "mag", "mal", "transformer", "mamba2", "gated_deltanet")
OFF = ("model.memory.writes=false",)
STREAM = ("forecast.lookback=96", "data.seq_len=768", "train.micro_batch=4")
"""Samples of eight lookbacks, with a forecast after each and the state carried along; as many rows per step."""
GENERATION = (
    "forecast.series=simbench-generation", "forecast.windows=256", "train.batch_tokens=768", "train.micro_batch=8",
    "train.max_steps=320", "train.decay_steps=32", "train.eval_every=32", "train.checkpoint_every=32",
    "train.eval_samples=64",
)  # fmt: skip
"""Windows of 42 channels: eight per step equal 168 windows of elecdemand, which has two channels."""
ALL = (
    "forecast.windows=null", "train.max_steps=3770", "train.decay_steps=377", "train.eval_every=377",
    "train.checkpoint_every=377", "train.patience=2",
)  # fmt: skip
"""All 12,073 training windows of elecdemand in an epoch."""
HORIZONS = (96, 192, 336, 720)
SERIES = {
    # name: (rows of training, blocks, width, learning rate, windows per step), as in iTransformer's scripts
    "ETTh1": (8640, 2, 256, 1e-4, 32), "ETTh2": (8640, 2, 128, 1e-4, 32), "ETTm1": (34560, 2, 128, 1e-4, 32),
    "ETTm2": (34560, 2, 128, 1e-4, 32), "ECL": (18412, 3, 512, 5e-4, 16), "Traffic": (12280, 4, 512, 1e-3, 16),
    "Weather": (36887, 3, 512, 1e-4, 32),
}  # fmt: skip


def _paper(series: str, horizon: int) -> tuple[str, ...]:
    """Settings for a series and horizon: at most ten epochs, the rate halved after each, a patience of three."""
    rows, layers, width, lr, batch = SERIES[series]
    each = (rows - 96 - horizon + 1) // batch
    return (
        f"forecast.series={series}", f"forecast.horizon={horizon}", "forecast.windows=null", "data.dir=data/ett",
        f"model.d_model={width}", f"model.n_layers={layers}", "model.mlp_hidden=null", "model.init_std=0.02",
        f"train.lr={lr}", f"train.batch_tokens={batch * 96}", "train.micro_batch=4", f"train.decay_steps={each}",
        f"train.eval_every={each}", f"train.checkpoint_every={each}", f"train.max_steps={10 * each}",
        "train.eval_samples=100000",
    )  # fmt: skip


def _error(row: str, kind: str, streamed: bool = False) -> Find:
    def find(result: dict) -> Figure | None:
        found = result["streamed" if streamed else "rows"].get(row)
        n = result["streamed"].get("n", 0) if streamed else found and found["n"]
        return found and Figure("number", found[kind], n)

    return find


def _lookback(rows: int) -> tuple[str, ...]:
    """Settings for a lookback of ``rows``, with as many windows per step as for 96 rows."""
    return f"data.seq_len={rows}", f"train.batch_tokens={32 * rows}"


def _tiny() -> list[Row]:
    rows = [Row(model, "elecdemand-96", (), "H = 96") for model in MODELS]
    variants = {
        # variant: (models, settings, displayed name)
        "elecdemand-96-chunk-4": (("lmm",), ("model.memory.chunk_size=4",), "H = 96, chunk 4"),
        "elecdemand-96-off": (("lmm",), OFF, "H = 96, memory off"),
        "elecdemand-96-stream": (("lmm", "mamba2"), STREAM, "H = 96, trained on streams"),
        "elecdemand-96-stream-off": (("lmm",), (*STREAM, *OFF), "H = 96, trained on streams, memory off"),
        "elecdemand-96-l336": (("lmm", "transformer"), _lookback(336), "L = 336, H = 96"),
        "elecdemand-96-l336-off": (("lmm",), (*_lookback(336), *OFF), "L = 336, H = 96, memory off"),
        "elecdemand-720": (("lmm", "transformer"), ("forecast.horizon=720",), "H = 720"),
        "generation-96": (("lmm", "transformer"), GENERATION, "generation, H = 96"),
        "generation-96-off": (("lmm",), (*GENERATION, *OFF), "generation, H = 96, memory off"),
        "elecdemand-96-l720": (("lmm", "transformer"), _lookback(720), "L = 720, H = 96"),
        "elecdemand-96-all": (("lmm", "transformer"), ALL, "H = 96, all windows"),
    }  # fmt: skip
    for variant, (models, words, change) in variants.items():
        rows += [Row(model, variant, words, change) for model in models]
    return rows


def table3(size: str) -> Study:
    if size == "tiny":
        rows = _tiny()
    else:
        rows = [
            Row(model, f"{series}-{horizon}", _paper(series, horizon), f"{series}, H = {horizon}")
            for series in SERIES
            for horizon in HORIZONS
            for model in MODELS
        ]
        rows += [
            Row("lmm", f"{series}-{horizon}-off", (*_paper(series, horizon), *OFF), f"{series}, H = {horizon}, off")
            for series in SERIES
            for horizon in HORIZONS
        ]
    columns = [
        Column(f"{name} {kind.upper()}", "forecast", _error(row, kind))
        for row, name in (("model", "test"), ("ridge on the lookback", "ridge"), ("last day", "last day"))
        for kind in ("mse", "mae")
    ]
    columns += [
        Column("streamed: carried MSE", "forecast", _error("carried", "mse", True)),
        Column("streamed: fresh MSE", "forecast", _error("fresh", "mse", True)),
        Column("steps", TRAINING, steps_trained),
    ]
    note = (
        "Lookback 96; errors of scaled values, over all windows of the test. The paper's columns are means over four "
        "horizons: docs/forecasting.md has them. Its width, recipe and lookback are not said."
    )
    seeds = (0, 1) if size == "tiny" else (0,)
    return Study(
        "table3", "Forecasting", size, tuple(rows), tuple(columns), (Measure("forecast", "forecast"),), size, note,
        folder="forecast", rated=False, seeds={row.key: seeds for row in rows}, pictures=(pictures.forecasts,),
    )  # fmt: skip
