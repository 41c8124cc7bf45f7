"""Plans between sites: a serving table of sites by experts, found for uneven links and many sites."""
