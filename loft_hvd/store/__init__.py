"""The sample store: what ranks have read stays near, and peers ask each other before the source."""
