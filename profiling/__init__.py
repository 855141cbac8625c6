"""From an Nsight Systems capture to a verdict: record.sh, audit, report. Standard library only."""
