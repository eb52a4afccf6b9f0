package agent

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"testing"
)

// pems are the certificate and its key as files have them.
func pems(t *testing.T, certificate tls.Certificate) (public, private []byte) {
	t.Helper()
	key, err := x509.MarshalPKCS8PrivateKey(certificate.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate[0]}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})
}
