"""The theorems' bounds beside what is measured, on problems whose constants are known."""
