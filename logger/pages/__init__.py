"""Self-contained HTML pages: charts, styles and templates that the reports, replays and galleries share. No torch."""
