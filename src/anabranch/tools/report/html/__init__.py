"""Runs as one HTML file: Python says what is drawn, plotly.js draws it, and nothing is fetched from anywhere."""
