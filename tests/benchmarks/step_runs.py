"""Small run files of steps, and what a summary claims of them."""

from benchmarks import summary

KEY = "mamba2-step-p64-n128-g16-w16-t1-xbf16-s{}-rbf16-fdbs"


def cell(batch, state_dtype="fp32", **changes):
    values = {
        "spec": KEY.format(state_dtype),
        "effective_batch": batch,
        "plan": "plan",
        "time_us": {"mix": 300.0, "nonflush": 250.0, "flush": 550.0},
        "roof_us": {"read": 225.0, "scale": 545.0},
        "native_us": 560.0,
        "native_name": "native_step",
        "default_us": {"mix": 360.0},
        "noise_floor": 0.005,
    }
    return {**values, **changes}


def run(*cells, date="2026-11-30", **more):
    return {"what": "tune", "gpu": "H200", "date": date, "cells": list(cells), **more}


def value(records, claim, **of):
    (record,) = summary.select(records, claim, **of)
    return record["value"]


def verifying(tokens, family="mamba2", **changes):
    key = KEY.format("fp32") if family == "mamba2" else "gdn-step-p128-n128-g2-w16-t1-xbf16-sfp32-rbf16-fbsl"
    spec = key.replace("-step-", "-verify-").replace("-t1-", f"-t{tokens}-")
    roofs = {
        "roof_us": {"read": 225.0, "scale": 545.0, "mix": 305.0},
        "time_us": {"mix": 400.0, "nonflush": 250.0},
    }
    return cell(changes.pop("batch", 32768), spec=spec, **{**roofs, **changes})
