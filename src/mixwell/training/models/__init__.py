"""Small models that come with mixwell."""
