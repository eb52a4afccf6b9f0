package plugin

import (
	"context"
	"log/slog"
	"strconv"
	"time"

	"golang.org/x/time/rate"
)

// refusal is an Allocate that was refused.
type refusal struct {
	devices []string
	err     error
}

const (
	// refusalBurst and refusalInterval bound how often refusals are logged: the
	// kubelet makes a few, a client that is none may make thousands a second.
	refusalBurst    = 20
	refusalInterval = time.Second
	// shownDevices and shownBytes bound what is shown of a request.
	shownDevices, shownBytes = 16, 128
)

// refusalLog writes refusals down. It is for one goroutine.
type refusalLog struct {
	log     *slog.Logger
	limiter *rate.Limiter
	// silent counts those that were not logged since the last that was.
	silent int
}

func newRefusalLog(log *slog.Logger) *refusalLog {
	return &refusalLog{log: log, limiter: rate.NewLimiter(rate.Every(refusalInterval), refusalBurst)}
}

func (l *refusalLog) write(ctx context.Context, refused refusal) {
	if !l.limiter.Allow() {
		l.silent++
		return
	}
	shown := make([]string, 0, min(len(refused.devices), shownDevices))
	for _, id := range refused.devices[:cap(shown)] {
		shown = append(shown, brief(id))
	}
	attributes := []slog.Attr{slog.Any("devices", shown), slog.Int("requested", len(refused.devices)), slog.Any("error", refused.err)}
	if l.silent > 0 {
		attributes = append(attributes, slog.Int("unlogged", l.silent))
		l.silent = 0
	}
	l.log.LogAttrs(ctx, slog.LevelWarn, "allocation refused", attributes...)
}

// brief is a device's ID as a message shows it: quoted, and no longer than an ID
// may be that is one.
func brief(id string) string {
	if len(id) <= shownBytes {
		return strconv.Quote(id)
	}
	return strconv.Quote(id[:shownBytes]) + "…"
}
