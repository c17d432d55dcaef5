"""The theorems' bounds compared with measurements, on problems with known constants."""
