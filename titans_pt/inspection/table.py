"""Summary of an inspection in a few lines of text."""

import numpy as np

from titans_pt.inspection.inspection import Inspection, shown


def table(result: Inspection, top: int = 10, context: int = 30) -> str:
    """Means of every memory over tokens and heads, and the ``top`` most surprising tokens in their context."""
    columns = ("theta", "eta", "alpha", "surprise", "weight_norm", "momentum_norm")
    width = max(len("memory"), *(len(name) for name in result.memories))
    lines = [f"{'memory':{width}}" + "".join(f"{name:>15}" for name in columns)]
    for n, name in enumerate(result.memories):
        lines.append(f"{name:{width}}" + "".join(f"{getattr(result, c)[n].mean():>15.4g}" for c in columns))
    lines.append(f"\n{len(result.ids)} tokens, mean loss {result.nll[1:].mean():.3f} nats per token")
    lines.append("\nmost surprising tokens (times the median around them; the token in [ ]):")
    lines.append(f"{'times':>6}{'token':>8}{'loss':>8}  text")
    for t in np.argsort(-result.score, kind="stable")[:top]:
        before = "".join(result.pieces[max(0, t - context) : t])[-context:]
        after = "".join(result.pieces[t + 1 : t + 1 + context])[:context]
        text = shown(f"{before}[{result.pieces[t]}]{after}")
        lines.append(f"{result.score[t]:>6.2f}{t:>8}{result.nll[t]:>8.2f}  {text}")
    return "\n".join(lines)
