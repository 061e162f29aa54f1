#!/usr/bin/env bash
# Check and measure what only a GPU runs; prints one table, under 8 minutes. Options go to gpu.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu.py" "$@"
