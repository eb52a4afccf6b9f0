package nodestatus

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// TestEvict holds what is asked of the API server, and what its refusals mean.
func TestEvict(t *testing.T) {
	for _, test := range []struct {
		status  int
		meaning error
	}{
		{http.StatusCreated, nil}, {http.StatusTooManyRequests, nodereport.ErrDisruptionBudget}, {http.StatusForbidden, nodereport.ErrMayNotEvict},
		{http.StatusNotFound, nodereport.ErrPodGone}, {http.StatusConflict, nodereport.ErrPodGone},
	} {
		requests := 0
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests++
			body, err := io.ReadAll(r.Body)
			var got policyv1.Eviction
			if err := errors.Join(err, json.Unmarshal(body, &got)); err != nil {
				t.Error(err)
			}
			if r.Method != http.MethodPost || r.URL.Path != "/api/v1/namespaces/ns/pods/p/eviction" || r.Header.Get("Content-Type") != "application/json" {
				t.Errorf("asked %s %s %s", r.Method, r.URL.Path, r.Header.Get("Content-Type"))
			}
			if got.Kind != "Eviction" || got.APIVersion != "policy/v1" || got.Name != "p" || got.Namespace != "ns" || *got.DeleteOptions.Preconditions.UID != "u1" {
				t.Errorf("eviction %s", body)
			}
			answer(w, test.status, "no")
		}))
		evictor, err := NewEvictor(&rest.Config{Host: server.URL}, nodeName)
		if err != nil {
			t.Fatal(err)
		}
		err = evictor.Evict(t.Context(), "ns", "p", "u1")
		if (err == nil) != (test.meaning == nil) || !errors.Is(err, test.meaning) || requests != 1 {
			t.Errorf("%d: %v after %d requests, want %v after one", test.status, err, requests, test.meaning)
		}
		server.Close()
	}
	if _, err := NewEvictor(nil, nodeName); err == nil {
		t.Error("without an API server")
	}
}

// TestOverLimitNotices holds that each thing that happens to a container is one event.
func TestOverLimitNotices(t *testing.T) {
	over := nodereport.OverLimit{Unit: "GPU-1", Container: sharing.Container{Namespace: "ns", Pod: "p", Name: "c"}, Text: "too much"}
	refused, evicted := over, over
	refused.Refused = "budget"
	evicted.Evicted = true
	other := over
	other.Unit = "GPU-2"
	found := warning(ReasonMemoryOverLimit, "too much")
	for _, test := range []struct {
		name       string
		last, next []nodereport.OverLimit
		want       []eventText
	}{
		{"over", nil, []nodereport.OverLimit{over}, []eventText{found}},
		{"still", []nodereport.OverLimit{over}, []nodereport.OverLimit{over}, nil},
		{"refused", []nodereport.OverLimit{over}, []nodereport.OverLimit{refused}, []eventText{warning(ReasonEvictionRefused, "pod ns/p is not evicted: budget")}},
		{"still refused", []nodereport.OverLimit{refused}, []nodereport.OverLimit{refused}, nil},
		{"evicted", []nodereport.OverLimit{over}, []nodereport.OverLimit{evicted}, []eventText{warning(ReasonEvicted, "pod ns/p is evicted: too much")}},
		{"on another GPU", []nodereport.OverLimit{over}, []nodereport.OverLimit{over, other}, []eventText{found}},
		{"gone", []nodereport.OverLimit{evicted}, nil, nil},
	} {
		got := newEvents(&nodereport.Report{OverLimit: test.last}, nodereport.Report{OverLimit: test.next})
		if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(eventText{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}
