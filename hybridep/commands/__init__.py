"""One module per verb of the command line, loaded only when the verb is used."""
