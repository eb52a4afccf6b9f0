package main

import "context"

// looks are scrapes of the metrics and views of the page.
func looks(_ context.Context, b bench, virgate *process, _ plugin) ([]figure, error) {
	var scraped, viewed sample
	var objects counts
	for range b.rounds(15) {
		if err := scraped.timed(func() error { _, err := virgate.get("/metrics"); return err }); err != nil {
			return nil, err
		}
		if err := viewed.timed(func() error { _, err := virgate.get("/status"); return err }); err != nil {
			return nil, err
		}
		// Between two scrapes the program has made what one takes.
		if err := objects.counted(virgate, func() error { return nil }); err != nil {
			return nil, err
		}
	}
	return []figure{
		{"scrape", milliseconds(scraped.median()), "ms"},
		{"scrape-objects", objects.median(), ""},
		{"page", milliseconds(viewed.median()), "ms"},
	}, nil
}
